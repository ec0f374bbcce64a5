"""FedDyn's client: Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263.

    min  fᵢ(w) − ⟨hᵢ, w⟩ + (α/2)‖w − w_t‖²        hᵢ ← hᵢ − α (wᵢ − w_t)

hᵢ is kept by the client and starts at zero. At the minimum it is ∇fᵢ(wᵢ), with any optimiser that finds it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, Finished, Start, squared_distance
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class FedDyn(Algorithm):
    alpha: float

    client_state = ("h",)

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """With ⟨hᵢ, w − w_t⟩: the same gradient, and a value near the task's own."""
        own, anchor = start.client_state["h"], start.anchor
        pull = torch.stack([(own[name] * (parameters[name] - anchor[name])).sum() for name in anchor]).sum()
        return task.loss(parameters, batch) - pull + self.alpha / 2 * squared_distance(parameters, anchor)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        own, anchor = start.client_state["h"], start.anchor
        return Finished(
            client_state={
                "h": {name: own[name] - self.alpha * (trained[name] - anchor[name]) for name in anchor}
            }
        )
