"""FedBABU: Oh et al., Towards Enhanced Representation for Federated Image Classification, arXiv 2106.06042.

    θ_ext ← Σᵢ (nᵢ/n) θᵢ_ext          the body is trained, sent and averaged
    θ_cls                             the head keeps the values it was initialised with, on every client
    at the end                        each client fine-tunes the head on its own rows: its personal model

The global model that is evaluated after a round has the untrained head; `personal.json` has both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting
from fedfrozen_app.exchange.plan import Phase, Plan
from fedfrozen_app.models.select import selected
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    fixed: list[str] = setting(
        ["head"], "What keeps its initial values in the federation: roles (`head`) or layers (`layer.-1`)"
    )
    fine_tune: list[str] = setting(
        ["head"], "What each client trains for itself at the end. `[all]`: the whole model"
    )
    fine_tune_epochs: int = setting(5, "For so many epochs", least=1)


class FedBABU(base.PlannedFedAvg):
    """Train and average the body alone under a fixed head, which clients fine-tune at the end."""

    paper = "Oh et al. 2022, arXiv 2106.06042"
    Settings = Settings
    personal = True  # although nothing is private before the end
    pacings = ("deadline", "buffered")

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        self.fixed = selected(self.settings.fixed, federation.roles, "strategy.fixed")
        self.tuned = selected(self.settings.fine_tune, federation.roles, "strategy.fine_tune")

    def plan(self, server_round: int) -> Plan:
        return super().plan(server_round).freeze(self.fixed)

    def afterwards(self, server_round: int) -> Plan:
        tuned = tuple(self.tuned)
        return Plan(tuned, ()).in_phases(Phase(tuned, self.settings.fine_tune_epochs))

    @classmethod
    def phase_epochs(cls, settings: Any) -> tuple[tuple[int | None, ...], ...]:
        return ((settings.fine_tune_epochs,),)

    def evaluated(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The personal model is the fine-tuned one: there is none before."""
        after = {"personal": metrics["after"]} if "after" in metrics else {}
        after |= {
            key.replace("fair/after/", "fair/personal/"): value
            for key, value in metrics.items()
            if key.startswith("fair/after/")
        }
        before = ("fair/personal/", "fair/after/")
        return {
            key: value
            for key, value in metrics.items()
            if key not in ("personal", "after") and not key.startswith(before)
        } | after
