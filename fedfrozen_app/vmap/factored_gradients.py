"""Keep weight gradients factored for large linear layers under plain SGD.

The gradient of such a layer's weights is a product of two narrow arrays: with 10 rows and 128 x 12544 weights
it has 13 times as many numbers as both. Writing it, reading it in the optimiser and subtracting it costs more
than all other work on these weights. Here the factors are kept, and the SGD step subtracts their product in
one pass.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor, nn

from fedfrozen_app.vmap.devices import is_exact
from fedfrozen_app.vmap.load_gpu_kernels import gpu_kernels_on

LEAST = 1 << 17  # weights of a layer: with fewer there is little to save
MOST = 64  # rows
SAVED = 4  # minimum ratio of the gradient's size to the factors': less is not worth a GPU kernel
Factors = tuple[Tensor, Tensor]  # (clients, rows, out) and (clients, rows, in)


class FactoredGradients:
    """The factors that a step keeps for these weights, (clients, out, in) by name."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names = {weight.data_ptr(): name for name, weight in weights.items() if weight.dim() == 3}
        self.factors: dict[str, Factors] = {}

    def suits(self, rows: Tensor, weight: Tensor) -> bool:
        """Whether the gradient of a product of these, (clients, rows, in), should stay factored."""
        (_, count, _), (_, out, width) = rows.shape, weight.shape
        saves = count <= MOST and out * width >= SAVED * count * (out + width)
        return saves and weight[0].numel() >= LEAST and weight.data_ptr() in self._names

    def keep(self, weight: Tensor, gradients: Tensor, rows: Tensor) -> bool:
        """Keep these factors in place of the gradient. False if the weights are used a second time: then the
        gradient is written."""
        name = self._names[weight.data_ptr()]
        if name in self.factors:
            return False
        # Detached: their graph refers to this object, so neither could be freed.
        self.factors[name] = gradients.detach(), rows.detach()
        return True


_factored: ContextVar[FactoredGradients | None] = ContextVar("factored", default=None)


@contextmanager
def keep_factored(factored: FactoredGradients) -> Iterator[None]:
    """Within the block products keep the gradients of these weights factored."""
    before = _factored.set(factored)
    try:
        yield
    finally:
        _factored.reset(before)


def factored_for(rows: Tensor, weight: Tensor) -> FactoredGradients | None:
    """Where to keep the gradient's factors, for (clients, out, in) weights and (clients, rows, in)."""
    factored = _factored.get()
    return factored if factored is not None and factored.suits(rows, weight) else None


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows · weightᵀ. In float32 torch's bmm reads such weights at a third of the GPU's memory bandwidth."""
    kernels = _kernels(rows) if is_exact() else None
    found: Tensor = torch.bmm(rows, weight.mT) if kernels is None else kernels.multiply(rows, weight)
    return found


def descend(weight: Tensor, factors: Factors, rates: Tensor) -> None:
    """weight −= rate · gradientsᵀ · rows, (clients, out, in). `rates`: each serves an equal share of the
    clients."""
    gradients, rows = factors
    if (kernels := _kernels(weight)) is not None:
        kernels.subtract_product(weight, gradients, rows, rates)
    else:
        each = rates.repeat_interleave(len(weight) // len(rates)).view(-1, 1, 1)
        weight.sub_(each * torch.bmm(gradients.mT, rows))


def _kernels(numbers: Tensor) -> ModuleType | None:
    if numbers.dtype != torch.float32:
        return None
    return gpu_kernels_on(numbers.device, "vmap.factored_kernels")


def wide_layers(model: nn.Module, trained: Collection[str]) -> list[str]:
    """Names of the weights whose gradients may stay factored."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.weight" in trained and module.weight.numel() >= LEAST
    ]
