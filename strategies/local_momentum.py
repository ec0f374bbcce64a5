"""Local momentum: after Yu, Jin and Yang, Momentum SGD for Distributed Optimization, arXiv 1905.03817.

    m ← β m + ∇fᵢ(w)        w ← w − η m

Each client keeps its m between rounds, and the model is averaged as FedAvg's. The paper averages m too; here
it stays with the client, so that a round sends no more than FedAvg. β = 0 is FedAvg with plain SGD.
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    beta: float = setting(
        0.9, "How much of its momentum a client keeps in every step; 0 is FedAvg", least=0, most=1
    )


class LocalMomentum(base.PlannedFedAvg):
    """FedAvg whose clients keep their momentum between rounds."""

    paper = "Yu et al. 2019, arXiv 1905.03817"
    Settings = Settings
    algorithm = "local_momentum"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"beta": settings.beta}
