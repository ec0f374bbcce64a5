"""MOON's client: Li et al., Model-Contrastive Federated Learning, arXiv 2103.16257.

    fᵢ(w) + μ · mean −log( exp(cos(z, z_global)/τ) / (exp(cos(z, z_global)/τ) + exp(cos(z, z_previous)/τ)) )
    = fᵢ(w) + μ · mean log(1 + exp((cos(z, z_previous) − cos(z, z_global))/τ))

z is the head's input for a row: from the model in training, from the round's global model, and from this
client's model at the end of its last round, which the client keeps. In its first round the global model
stands in for the latter, and the term is the constant μ log 2, without a gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Finished, Start
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class Moon(Algorithm):
    mu: float
    temperature: float

    client_state = ("previous",)

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        kept = own.get("previous", {})
        return {"previous": {name: kept.get(name, value) for name, value in model.items()}}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        logits, here = task.features(parameters, batch)
        if here.ndim != 2:
            raise UserError(
                "strategy=moon contrasts one representation a row, and this task has one for each token: "
                "choose another strategy."
            )
        near, far = (
            task.features(other, batch)[1] for other in (start.anchor, start.client_state["previous"])
        )
        # cos(z, far) − cos(z, near) as one product: where both are the same, no gradient is left, to the bit.
        apart = functional.normalize(far) - functional.normalize(near)  # (rows, width)
        each = functional.softplus((functional.normalize(here) * apart).sum(dim=1) / self.temperature)
        rows = torch.ones_like(each) if batch.mask is None else batch.mask  # without a batch's padding
        contrast = (each * rows).sum() / rows.sum().clamp(min=torch.finfo(rows.dtype).tiny)
        return task.loss_of(logits, batch) + self.mu * contrast

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        return Finished(client_state={"previous": dict(trained)})
