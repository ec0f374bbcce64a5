"""MimeLite: Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms, arXiv 2008.03606.

    yᵢ ← yᵢ − η ((1 − β) ∇fᵢ(yᵢ) + β m)        m ← (1 − β) Σᵢ pᵢ ∇fᵢ(x) + β m

Clients take local steps with the server's momentum m, which they hold fixed; it moves once per round, by the
clients' full gradients at the round's model x. The model is averaged as FedAvg's. pᵢ are the shares of
examples of the clients that replied, where the paper weights clients equally. β = 0 is FedAvg with plain
SGD.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base
from fedfrozen_app.server.aggregate import Update


@dataclass(frozen=True)
class Settings(base.Settings):
    beta: float = setting(0.9, "How much of the server's momentum stays; 0 is FedAvg", least=0, most=1)


class MimeLite(base.PlannedFedAvg):
    """FedAvg whose clients step with the server's momentum."""

    paper = "Karimireddy et al. 2020, arXiv 2008.03606"
    Settings = Settings
    algorithm = "mimelite"
    codecs = "complete"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"beta": settings.beta}

    def step(self, update: Update) -> dict[str, Tensor]:
        beta, m = self.settings.beta, self.server_state["m"]
        for name, mean in update.extra["gradient"].items():
            m[name] = (1 - beta) * mean + beta * m[name]
        return super().step(update)
