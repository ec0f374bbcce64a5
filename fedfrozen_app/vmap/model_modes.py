"""Context managers that switch a model's mode within a block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode: no dropout."""
    was_training = model.training
    if was_training:  # for a small model setting every module takes as long as a step
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in training mode, afterwards in evaluation mode."""
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def with_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block these modules have these forward functions, whatever an outer block has set."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, outer in before.items():
            if outer is None:
                del module.forward  # its class has one
            else:
                module.forward = outer
