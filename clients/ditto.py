"""Ditto's client: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021."""

from dataclasses import dataclass

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Start, squared_distance
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class Ditto(Algorithm):
    """Train v together with w on the same batches; neither enters the other's gradient."""

    lam: float
    client_state, trainable_state = ("v",), ("v",)

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        """A client without a stored v starts from the round's model; the paper leaves v₀ open."""
        return {"v": {name: own.get("v", {}).get(name, value) for name, value in model.items()}}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """fᵢ(w) + fᵢ(v) + (λ/2)‖v − w_t‖²."""
        v = start.client_state["v"]
        near = self.lam / 2 * squared_distance(v, start.anchor)
        return task.loss(parameters, batch) + task.loss(v, batch) + near

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        return own["v"]
