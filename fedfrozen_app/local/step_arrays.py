"""The tensors of a stacked step. A CUDA graph keeps their addresses, so they only change in place."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.layouts import Layouts

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


@dataclass(frozen=True)
class StepArrays:
    """Tensors with one row per slot; if several runs share the step, each has equally many slots."""

    rows: Tensor  # (slots, width) the clients' trained arrays
    held: Tensor  # (slots, width) the clients' read-only arrays
    from_server: Tensor  # (runs, width) the arrays of the train request
    losses: Tensor  # (slots, reported losses) summed over the client's steps
    class_weights: Tensor  # (slots, classes) all ones without class weights
    columns: Tensor | None  # (slots, width) 1 if the slot's phase trains the column; None without phases
    # With several runs: the arrays that each reads and does not train, (runs, *shape) by name.
    models: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(
        cls, worker: "Worker", layouts: Layouts, size: int, request: TrainRequest, runs: int
    ) -> "StepArrays":
        like: dict[str, Any] = {"dtype": worker.task.dtype, "device": worker.device}
        rows = torch.zeros(size, layouts.trained.width, **like)
        return cls(
            rows=rows,
            held=torch.zeros(size, layouts.held.width, **like),
            from_server=torch.zeros(runs, layouts.from_server.width, **like),
            losses=torch.zeros(
                size, len(request.method.losses_reported()), dtype=torch.float64, device=worker.device
            ),
            class_weights=torch.ones(size, len(worker.corpus.classes)).to(rows),
            columns=torch.ones_like(rows) if len(request.plan.steps) > 1 else None,
            models=_models(worker, layouts, request, runs) if runs > 1 else {},
        )

    @property
    def size(self) -> int:
        return len(self.rows)

    @cached_property
    def row_list(self) -> list[Tensor]:
        """One tensor per slot: an optimiser counts the steps of each tensor, and clients come and go."""
        return [row.requires_grad_(True) for row in self.rows.unbind()]

    @cached_property
    def loss_list(self) -> tuple[Tensor, ...]:
        return self.losses.unbind()


def _models(worker: "Worker", layouts: Layouts, request: TrainRequest, runs: int) -> dict[str, Tensor]:
    """The parameters of each run, zeros at first. Plain training does not read the start, so trained ones
    are left out."""
    unread = set() if request.method.reads_start() else set(layouts.names)
    exchanged = worker.exchanged.items()
    return {
        name: value.detach().new_zeros(runs, *value.shape) for name, value in exchanged if name not in unread
    }
