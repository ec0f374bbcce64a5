"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging, arXiv 1910.06378, option II.

    c ← c + (1/N) Σ_S (cᵢ⁺ − cᵢ)

where S are the clients that replied, of all N; the model is averaged as in FedAvg. c and all cᵢ start at
zero, so the first round is FedAvg's. c is the unweighted mean of all cᵢ, and where it is zero no client moves
the model: SCAFFOLD converges to the optimum of the unweighted mean of the clients' objectives, whatever their
sizes. If a reply is lost, c lacks that client's last change. A client that loses its cᵢ restarts it at zero,
like a new one.
"""

from typing import Any

from torch import Tensor

from fedfrozen_app.config import ClientConfig, Config, require_client
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.base import PlannedFedAvg


class Scaffold(PlannedFedAvg):
    """FedAvg whose clients correct every step by the global and their own control variate."""

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
