"""Frozen linear layers, for code that runs under `vmap` over clients and examples.

There torch splits a layer into a product and an addition that reads and writes the result again. With shared
weights it is simply the same layer with more rows. This costs as much Python time as the layer itself, so it
pays in steps that are captured as CUDA graphs.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.func import vmap
from torch.nn.functional import linear

from fedfrozen_app.vmap.model_modes import with_forwards


class _Shared(Function):
    """x Wᵀ + b, with a gradient for x alone."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(rows, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return (
            (gradient @ weight.to(gradient.dtype)).to(ctx.dtype),
            None,
            None,
        )  # autocast may have rounded both

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], rows: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int | None]:
        if axes[0] is None or axes[1:] != (None, None):  # not shared
            return vmap(linear, in_dims=axes)(rows, weight, bias), 0
        return _Shared.apply(rows.movedim(axes[0], 0), weight, bias), 0


def shared_linears(model: nn.Module, trained: Collection[str]) -> AbstractContextManager[None]:
    """Within the block frozen linear layers run once for the rows of all clients."""
    trains = {name.rpartition(".")[0] for name in trained}
    return with_forwards(
        {
            module: partial(_forward, module)
            for name, module in model.named_modules()
            if type(module) is nn.Linear and name not in trains
        }
    )


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    result: Tensor = _Shared.apply(rows, module.weight, module.bias)
    return result
