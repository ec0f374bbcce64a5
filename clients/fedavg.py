"""The plain client: its own task's loss, nothing else."""

from torch import Tensor

from fedfrozen_app.models.task import Batch, Parameters, Task


def loss(parameters: Parameters, batch: Batch, task: Task, anchor: Parameters) -> Tensor:
    """fᵢ(w). `anchor` is where the round began; plain training does not look back at it."""
    return task.loss(parameters, batch)
