"""The task's loss over all of a client's training rows at its start, and its full-batch gradient there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.models.task import Batch, Parameters
from fedfrozen_app.vmap.model_modes import evaluation_mode

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

ROWS = 512  # per batch: activations of all of them are kept for the gradient


def start_loss_and_gradient(
    worker: "Worker", client: str, model: Parameters, method: Algorithm, names: tuple[str, ...]
) -> tuple[Tensor | None, dict[str, Tensor] | None]:
    """The loss and gradient of `model`, if the algorithm asks for them; missing parameters are taken from the
    loaded model. Without dropout or augmentation. Does not synchronise with the device."""
    index = worker.rows(client).train.to(worker.device)
    weights = worker.data.class_weights(index) if worker.config.client.class_weights else None
    live = {name: model[name].detach().clone().requires_grad_(method.start_gradient) for name in names}
    given = {**model, **live}
    total = torch.zeros((), dtype=torch.float64, device=worker.device)
    count = torch.zeros_like(total)
    sums: list[Tensor] = []
    with evaluation_mode(worker.model), torch.set_grad_enabled(method.start_gradient):
        for chunk in index.split(ROWS):
            part = worker.train_table.take(chunk)
            batch = Batch(part.inputs, part.labels, weights)
            own = _weights(worker, batch)
            loss = (worker.task.losses(worker.task.logits(given, batch), batch.labels) * own).sum()
            total, count = total + loss.detach().double(), count + own.double().sum()
            if method.start_gradient:
                found = torch.autograd.grad(loss, list(live.values()), materialize_grads=True)
                sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else list(found)
    mean = (total / count).to(worker.task.dtype) if method.start_loss else None
    if not method.start_gradient:
        return mean, None
    return mean, {name: (value / count).to(value) for name, value in zip(live, sums, strict=True)}


def _weights(worker: "Worker", batch: Batch) -> Tensor:
    """(rows,) the weight of each row in the mean, as in `Task.loss_of`."""
    labels, task = batch.labels, worker.task
    if (own := task.target.weights(labels, task.dtype)) is not None:
        return own
    if batch.class_weights is not None and labels.ndim == 1:
        return batch.class_weights[labels]
    return torch.ones(len(labels), dtype=task.dtype, device=labels.device)
