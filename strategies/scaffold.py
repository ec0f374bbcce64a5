"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging, arXiv 1910.06378, option II.

    c ← c + (1/N) Σ_S (cᵢ⁺ − cᵢ)

over those who replied, of all N clients; the model is averaged as FedAvg's. c and all cᵢ begin at zero, so
that the first round is FedAvg's. c is the plain mean of all cᵢ, and where it is zero no client moves the
model: SCAFFOLD rests at the optimum of the plain mean of the clients' objectives, whatever their sizes. A
reply that is lost leaves c behind by that client's last change. A client that loses its cᵢ begins again at
zero, as a new one does.
"""

from typing import Any

from torch import Tensor

from fedfrozen_app.config import ClientConfig, Config, require_client
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.base import PlannedFedAvg


class Scaffold(PlannedFedAvg):
    """FedAvg whose clients correct every step by what all know and what they know of themselves."""

    paper = "Karimireddy et al. 2020, arXiv 1910.06378"
    algorithm = "scaffold"
    codecs = "complete"
    equal = ("dc",)

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        because = "reads gradients off the movement of plain SGD"
        require_client(config, because, optimizer="sgd", weight_decay=0, clip=None, head_lr=None)

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"momentum": client.momentum}

    def step(self, update: Update) -> dict[str, Tensor]:
        share = update.replies / update.population
        for name, mean in update.extra["dc"].items():
            self.server_state["c"][name] = self.server_state["c"][name] + share * mean
        return super().step(update)
