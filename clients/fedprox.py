"""FedProx's client: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

from dataclasses import dataclass

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, Start, squared_distance
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class FedProx(Algorithm):
    mu: float

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """hᵢ(w) = fᵢ(w) + (μ/2)‖w − w_t‖², over the trained names: frozen ones cannot move."""
        return task.loss(parameters, batch) + self.mu / 2 * squared_distance(parameters, start.anchor)
