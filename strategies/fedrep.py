"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.

    hᵢ ← SGD on fᵢ(φ, hᵢ), τ epochs, φ fixed        first the client's own head
    φᵢ ← SGD on fᵢ(φᵢ, hᵢ), hᵢ fixed                then the representation
    φ ← Σᵢ (nᵢ/n) φᵢ                                which alone is sent and averaged

The paper averages φ over clients of equal size; here clients are weighted by their examples, as in all
strategies. Each phase has a fresh optimiser. With nothing private there is one phase, and it is FedAvg.
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting
from fedfrozen_app.exchange.plan import Phase, Plan
from strategies import fedper


@dataclass(frozen=True)
class Settings(fedper.Settings):
    head_epochs: int = setting(
        2, "τ: epochs of the private part, before the rest trains for `client.local_epochs`", least=1
    )


class FedRep(fedper.FedPer):
    """Train the client's own head first, then the body; only the body is sent and averaged."""

    paper = "Collins et al. 2021, arXiv 2102.07078"
    Settings = Settings

    @classmethod
    def phase_epochs(cls, settings: Any) -> tuple[tuple[int | None, ...], ...]:
        return ((settings.head_epochs, None),)

    def plan(self, server_round: int) -> Plan:
        plan, home = super().plan(server_round), set(self.home)
        body = tuple(name for name in plan.trained if name not in home)
        return plan.in_phases(Phase(tuple(self.home), self.settings.head_epochs), Phase(body))
