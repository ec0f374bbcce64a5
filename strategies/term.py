"""TERM: Li et al., Tilted Empirical Risk Minimization, arXiv 2007.01162, tilted by clients.

    min (1/t) log Σᵢ (nᵢ/n) exp(t Fᵢ(w))        whose gradient weights client i by nᵢ exp(t Fᵢ)

The updates of the clients that replied are averaged with these weights. t > 0 favours clients with a high
loss, t < 0 those with a low one, and t = 0 is FedAvg. A common factor of a round's weights cancels: losses
are taken relative to the first reply's, and t (Fᵢ − F₁) is clamped to ±MOST, so that no weight overflows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clients.term import LOSS
from fedfrozen_app.config import Config, setting
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.server import base
from fedfrozen_app.server.aggregate import Update

MOST = 30.0  # exp(30) is 1e13: sums of float32 updates stay far from their largest number


@dataclass(frozen=True)
class Settings(base.Settings):
    t: float = setting(1.0, "How strongly the loss of a client tilts its weight; 0 is FedAvg")


class TERM(base.PlannedFedAvg):
    """Weight clients by the exponential of their loss."""

    paper = "Li et al. 2021, arXiv 2007.01162"
    Settings = Settings
    algorithm = "term"
    one_by_one = "weights"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: float | None = None  # the loss of the round's first reply

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        if config.aggregation.name != "mean":
            raise UserError(
                "strategy=term weights clients by the loss that they report, and aggregation="
                f"{config.aggregation.name} has weights of its own: choose aggregation=mean."
            )

    def client_weight(self, client: str, examples: int, metrics: Mapping[str, float]) -> float:
        if LOSS not in metrics:
            raise RunFailed(f"Client {client} sent no {LOSS}: the sites need this version.")
        self._first = metrics[LOSS] if self._first is None else self._first
        return examples * math.exp(max(-MOST, min(MOST, self.settings.t * (metrics[LOSS] - self._first))))

    def step(self, update: Update) -> dict[str, Tensor]:
        self._first = None
        return super().step(update)
