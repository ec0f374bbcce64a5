"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020.

hᵢ(w) = fᵢ(w) + (μ/2)‖w − w_t‖²        over the trained names; μ = 0 is FedAvg
"""

from dataclasses import dataclass
from typing import Any, Self

from fedfrozen_app.errors import UserError
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    mu: float = 0.01

    def checked(self, num_rounds: int) -> Self:
        if self.mu < 0:
            raise UserError(f"strategy.mu={self.mu:g} is negative: it must be 0 (FedAvg) or more.")
        return self


class FedProx(base.PlannedFedAvg):
    """FedAvg's plan; the client adds the proximal term."""

    Settings = Settings
    algorithm = "fedprox"

    def client_settings(self) -> dict[str, Any]:
        return {"mu": self.settings.mu}
