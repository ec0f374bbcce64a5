"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263.

    h ← h − α (1/N) Σ_S (wᵢ − w_t)        w ← (1/|S|) Σ_S wᵢ − h/α

where S are the clients that replied, of all N. All clients have equal weight, as in the paper, whose
objective is the unweighted mean of theirs. Then h is the mean of all hᵢ (clients/feddyn.py), sampled or not.
At convergence every hᵢ is ∇fᵢ(w), and their mean is zero: the true optimum, whatever the number of local
steps. A client that loses its hᵢ restarts it at zero, like a new one.
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
    """Align the clients' optima with the federation's by a linear and a proximal term."""

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
        # Only names that were sent: a frozen one is dropped, and starts again at zero.
        self.h = {
            name: self.h.get(name, torch.zeros_like(mean)) - alpha * share * mean
            for name, mean in update.model.items()
        }
        update.model = {name: mean - self.h[name] / alpha for name, mean in update.model.items()}
        update.values = None  # the mean is not the new model
        return super().step(update)

    def state(self) -> dict[str, Tensor]:
        return dict(self.h)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.h = dict(state)
