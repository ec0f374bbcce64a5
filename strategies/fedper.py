"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818.

    (W_B, Wᵢ_P) ← SGD on fᵢ(W_B, Wᵢ_P)          every client trains both parts together
    W_B ← Σᵢ (nᵢ/n) Wᵢ_B                        the base layers are sent and averaged; Wᵢ_P never leaves

The personal part is the head by default, in the paper the last layers: `strategy.private=[layer.-1,top]`.
With nothing private it is FedAvg.
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.models.select import selected
from fedfrozen_app.server import base

HELP = (
    "What stays on the client and is never sent: roles (`head`, `kernel`), layers (`layer.-1`), or both "
    "(`query.0`). `[]`: nothing"
)


@dataclass(frozen=True)
class Settings(base.Settings):
    private: list[str] = setting(["head"], HELP)


class FedPer(base.PlannedFedAvg):
    """Train everything together, keep a personal part (the head) on the client, and average the rest."""

    paper = "Arivazhagan et al. 2019, arXiv 1912.00818"
    Settings = Settings
    pacings = ("deadline", "buffered")

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        self.home = selected(self.settings.private, federation.roles, "strategy.private")

    def plan(self, server_round: int) -> Plan:
        return super().plan(server_round).keep_private(self.home)
