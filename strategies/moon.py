"""MOON: Li et al., Model-Contrastive Federated Learning, arXiv 2103.16257.

Each client pulls its representations towards the global model's and away from its own previous ones
(clients/moon.py). μ = 0 is FedAvg. The paper's projection head is left out: z is what the model's own head
reads.
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    mu: float = setting(1.0, "Weight of the contrast; 0 is FedAvg", least=0)
    temperature: float = setting(0.5, "τ: a smaller one makes the contrast sharper", above=0)


class Moon(base.PlannedFedAvg):
    """FedAvg with representations pulled towards the global model's, away from the client's previous ones."""

    paper = "Li et al. 2021, arXiv 2103.16257"
    Settings = Settings
    algorithm = "moon"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"mu": settings.mu, "temperature": settings.temperature}
