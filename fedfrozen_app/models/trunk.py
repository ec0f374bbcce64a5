"""The part of a model under its head, where the head alone trains: read once for many rows, as one batch.

Gradients of single examples are taken one by one, which makes every step of the model small. What nothing
trains needs none of that.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import ModelOutput

from fedfrozen_app.models.task import Batch, Task


def frozen_trunk(model: nn.Module, trained: Collection[str]) -> nn.Module | None:
    """What transformers calls the base model, or its encoder where what pools its states trains too. None
    where anything else in it trains, or where rows would see one another in it."""
    prefix: str = getattr(model, "base_model_prefix", "")
    trunk = getattr(model, prefix, None) if prefix else None
    inside = [name for name in trained if name.startswith(f"{prefix}.")]
    if inside and all(name.startswith(f"{prefix}.pooler.") for name in inside):
        trunk = getattr(trunk, "encoder", None)
    elif inside:
        return None
    if not isinstance(trunk, nn.Module) or any(isinstance(each, _BatchNorm) for each in trunk.modules()):
        return None
    return trunk


@torch.no_grad()
def read_by(trunk: nn.Module, task: Task, batch: Batch) -> ModelOutput | None:
    """What the trunk gives for these rows, with the model as it is loaded; None where that has no names."""
    given: list[Any] = []
    hook = trunk.register_forward_hook(lambda module, inputs, output: given.append(output))
    try:
        task.logits({}, batch)
    finally:
        hook.remove()
    return given[-1] if given and isinstance(given[-1], ModelOutput) else None


@contextmanager
def answering(trunk: nn.Module, answer: Any) -> Iterator[None]:
    """Within it the trunk gives this, whatever it is asked."""
    trunk.forward = lambda *args, **named: answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trunk.forward  # its class has one
