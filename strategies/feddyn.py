"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263.

    h ← h − α (1/N) Σ_S (wᵢ − w_t)        w ← (1/|S|) Σ_S wᵢ − h/α

over those who replied, of all N clients. Every client counts the same, as in the paper, whose objective is
the plain mean of the clients'. Then h is the mean of all hᵢ (clients/feddyn.py), drawn or not. Where the
rounds come to rest every hᵢ is ∇fᵢ(w), and their mean is zero: the true optimum, however many local steps
there are. A client that loses its hᵢ begins again at zero, as a new one does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.exchange.names import PARAMETERS
from fedfrozen_app.server import base
from fedfrozen_app.server.aggregate import Update


@dataclass(frozen=True)
class Settings(base.Settings):
    alpha: float = setting(
        0.1,
        "Strength of the pull towards the round's model; the smaller, the longer the server's steps",
        above=0,
    )


class FedDyn(base.PlannedFedAvg):
    """A linear and a proximal term bring the clients' optima together with the federation's."""

    paper = "Acar et al. 2021, arXiv 2111.04263"
    Settings = Settings
    algorithm = "feddyn"
    codecs = "none"
    equal = (PARAMETERS,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.h: dict[str, Tensor] = {}

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"alpha": settings.alpha}

    def step(self, update: Update) -> dict[str, Tensor]:
        share, alpha = update.replies / update.population, self.settings.alpha
        # Of the names that were sent, and no others: one that is frozen leaves, and comes back at zero.
        self.h = {
            name: self.h.get(name, torch.zeros_like(mean)) - alpha * share * mean
            for name, mean in update.model.items()
        }
        update.model = {name: mean - self.h[name] / alpha for name, mean in update.model.items()}
        update.values = None  # the mean is not where the model goes
        return super().step(update)

    def state(self) -> dict[str, Tensor]:
        return dict(self.h)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.h = dict(state)
