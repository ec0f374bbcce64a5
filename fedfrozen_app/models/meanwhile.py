"""A model in another state for a while, and back again however that ends."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Within it the model does not train: nothing is dropped out."""
    was_training = model.training
    if was_training:  # or to tell its modules, one by one, takes a small model as long as a step
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Within it the model trains, and afterwards it does not."""
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def with_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within it these modules compute in these ways, whatever way was lent to them around it."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, lent in before.items():
            if lent is None:
                del module.forward  # its class has one
            else:
                module.forward = lent
