"""Floating-point operations of a training step, counted by torch on two rows."""

from collections.abc import Collection

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from fedfrozen_app.vmap.model_modes import evaluation_mode

ROWS = 2


def operations_per_row(worker: Worker, trained: Collection[str]) -> float:
    """Forward and backward pass for one row, with gradients for these parameters alone.

    Without dropout, so that no generator advances. Frozen layers cost their forward pass, and their backward
    pass if gradients pass through them.
    """
    parameters = worker.parameters
    required = {name: value.requires_grad for name, value in parameters.items()}
    rows = torch.arange(min(ROWS, len(worker.train_table)), device=worker.device)
    try:
        for name, value in parameters.items():
            value.requires_grad_(name in trained)
        moving = [value for name, value in parameters.items() if name in trained]
        with evaluation_mode(worker.model), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            loss = worker.task.loss({}, Batch(*worker.take(rows)))
            if moving:
                torch.autograd.grad(loss, moving, allow_unused=True)
        return counter.get_total_flops() / len(rows)
    finally:
        for name, value in parameters.items():
            value.requires_grad_(required[name])
