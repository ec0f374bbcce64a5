"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020.

hᵢ(w) = fᵢ(w) + (μ/2)‖w − w_t‖²        over the trained names; μ = 0 is FedAvg
"""

import math
from dataclasses import dataclass
from typing import Any, Self

from fedfrozen_app.errors import UserError
from strategies import base


@dataclass(frozen=True)
class Settings(base.Settings):
    mu: float = 0.01

    def checked(self, num_rounds: int) -> Self:
        if not 0 <= self.mu < math.inf:
            raise UserError(f"strategy.mu={self.mu:g} is out of range: it must be 0 (FedAvg) or more.")
        return self


class FedProx(base.PlannedFedAvg):
    """FedAvg's plan; the client adds the proximal term."""

    Settings = Settings
    algorithm = "fedprox"

    def client_settings(self) -> dict[str, Any]:
        return {"mu": self.settings.mu}
