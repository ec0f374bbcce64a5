"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020.

hᵢ(w) = fᵢ(w) + (μ/2)‖w − w_t‖²        over the trained names; μ = 0 is FedAvg
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    mu: float = setting(
        0.01,
        "Strength of the pull towards the round's global model; 0 is FedAvg",
        least=0,
        instead="is negative: it must be 0 (FedAvg) or more.",
    )


class FedProx(base.PlannedFedAvg):
    """FedAvg with a proximal term that pulls every client towards the round's global model."""

    paper = "Li et al. 2020, arXiv 1812.06127"
    Settings = Settings
    algorithm = "fedprox"
    pacings = ("deadline", "buffered")

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"mu": settings.mu}
