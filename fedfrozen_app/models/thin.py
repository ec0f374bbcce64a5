"""Linear layers that few rows meet, in plain descent: their slopes are never written.

The slope of such a layer's weights is a product of two thin arrays: of 10 rows and 128 x 12544 weights it has
13 times as many numbers as both. Written, read again by the optimiser and taken off the weights, it costs
more than all else that is done to these. Here the factors are kept, and whoever moves the weights takes their
product off in one pass.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor, nn

from fedfrozen_app.devices import is_exact
from fedfrozen_app.models.kernels import kernels_on

LEAST = 1 << 17  # weights of a layer: with fewer there is little to spare
MOST = 64  # rows
SPARED = 4  # times as many numbers as the factors have: less is not worth a kernel
Factors = tuple[Tensor, Tensor]  # (clients, rows, out) and (clients, rows, in)


class Thin:
    """What a step keeps of these weights, (clients, out, in) by name."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names = {weight.data_ptr(): name for name, weight in weights.items() if weight.dim() == 3}
        self.factors: dict[str, Factors] = {}

    def suits(self, rows: Tensor, weight: Tensor) -> bool:
        """Whether a product of these, (clients, rows, in), is one of those that this is about."""
        (_, count, _), (_, out, width) = rows.shape, weight.shape
        spares = count <= MOST and out * width >= SPARED * count * (out + width)
        return spares and weight[0].numel() >= LEAST and weight.data_ptr() in self._names

    def keep(self, weight: Tensor, slopes: Tensor, rows: Tensor) -> bool:
        """Whether these factors stand for the slope; where weights are met twice, one slope is written."""
        name = self._names[weight.data_ptr()]
        if name in self.factors:
            return False
        # Without how they were made: that leads back to this object, and nobody could free either.
        self.factors[name] = slopes.detach(), rows.detach()
        return True


_thin: ContextVar[Thin | None] = ContextVar("thin", default=None)


@contextmanager
def thin_products(thin: Thin) -> Iterator[None]:
    """Within it products know of these weights."""
    before = _thin.set(thin)
    try:
        yield
    finally:
        _thin.reset(before)


def thin_with(rows: Tensor, weight: Tensor) -> Thin | None:
    """Who wants the factors of the slope of (clients, out, in) weights that meet (clients, rows, in)."""
    thin = _thin.get()
    return thin if thin is not None and thin.suits(rows, weight) else None


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows · weightᵀ. In float32 torch's own reads such weights at a third of the speed that a GPU has."""
    kernels = _kernels(rows) if is_exact() else None
    found: Tensor = torch.bmm(rows, weight.mT) if kernels is None else kernels.multiply(rows, weight)
    return found


def descend(weight: Tensor, factors: Factors, rates: Tensor) -> None:
    """weight −= rate · slopesᵀ · rows, (clients, out, in). `rates`: one for as many clients as come to it."""
    slopes, rows = factors
    if (kernels := _kernels(weight)) is not None:
        kernels.take_off(weight, slopes, rows, rates)
    else:
        each = rates.repeat_interleave(len(weight) // len(rates)).view(-1, 1, 1)
        weight.sub_(each * torch.bmm(slopes.mT, rows))


def _kernels(numbers: Tensor) -> ModuleType | None:
    if numbers.dtype != torch.float32:
        return None
    return kernels_on(numbers.device, "models.thin_kernels")


def wide_layers(model: nn.Module, trained: Collection[str]) -> list[str]:
    """Names of the weights of which this may be true."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.weight" in trained and module.weight.numel() >= LEAST
    ]
