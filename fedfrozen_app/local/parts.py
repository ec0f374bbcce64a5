"""Split the matrix of clients' rows into a step's stacked arrays, and write their gradients back into it.
With bf16 training, autocast would round each weight separately and add biases in float32, which makes
attention run in float32. Here the whole matrix is rounded once, so products, biases and attention are bf16.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.exchange.block import ALIGN, Layout
from fedfrozen_app.vmap.per_client_products import GradientBuffer

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)  # autocast rounds their weights and biases


def rounded_names(model: nn.Module, run: Callable[[], Any]) -> frozenset[str]:
    """The parameters that, while `run` runs, are read only by matrix products under autocast."""
    modes: dict[nn.Module, set[bool]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        modes.setdefault(module, set()).add(torch.is_autocast_enabled(inputs[0].device.type))

    products = [module for module in model.modules() if type(module) in PRODUCTS]
    hooks = [module.register_forward_pre_hook(note) for module in products]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    others = {
        id(value)
        for module in model.modules()
        if modes.get(module) != {True}
        for value in module._parameters.values()
    }
    return frozenset(name for name, value in model.named_parameters() if id(value) not in others)


class _Parts(torch.autograd.Function):
    """Views into rows, whose backward writes each gradient once into its own columns instead of summing
    mostly zero arrays."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, layout: Layout, rounded: Collection[str], room: GradientBuffer
    ) -> tuple[Tensor, ...]:
        ctx.layout, ctx.room = layout, room
        parts = views_of(rows, layout, rounded)
        room.begin(rows, parts.values())
        return tuple(parts.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        layout: Layout = ctx.layout
        room: GradientBuffer = ctx.room
        if not room.is_used and not room.whole.is_cuda:
            return _side_by_side(gradients, layout, room.whole), None, None, None
        columns = list(zip(room.whole.split(layout.spans, dim=1), layout.shapes, strict=True))
        sizes = [shape.numel() for shape in layout.shapes]
        padding = [part[:, size:] for (part, _), size in zip(columns, sizes, strict=True)]
        if padding := [part for part in padding if part.numel()]:
            torch._foreach_zero_(padding)
        places = [part[:, : shape.numel()].unflatten(1, shape or (1,)) for part, shape in columns]
        both = [
            (place, gradient.reshape(place.shape)) for place, gradient in zip(places, gradients, strict=True)
        ]
        both = [(place, gradient) for place, gradient in both if not room.is_placeholder(gradient)]
        for place, gradient in both:
            if room.is_written(place):  # by another product that reads the same weights
                place.add_(gradient)
        if new := [pair for pair in both if not room.is_written(pair[0])]:
            torch._foreach_copy_([place for place, _ in new], [gradient for _, gradient in new])
        return room.whole, None, None, None


def _side_by_side(gradients: Sequence[Tensor], layout: Layout, whole: Tensor) -> Tensor:
    """Concatenate in one call: for small arrays a CPU takes longer to find each place than to copy."""
    nothing, pieces = whole.new_zeros(len(whole), ALIGN), []
    for gradient, shape, span in zip(gradients, layout.shapes, layout.spans, strict=True):
        pieces.append(gradient.reshape(len(whole), -1))
        if padding := span - shape.numel():
            pieces.append(nothing[:, :padding])
    return torch.cat(pieces, dim=1, out=whole)


def parts_of(
    rows: Tensor,
    layout: Layout,
    rounded: Collection[str] = (),
    *,
    traced: bool = False,
    room: GradientBuffer | None = None,
) -> dict[str, Tensor]:
    """(clients, width) -> name: (clients, *shape); those of `rounded` in bf16.

    `traced`: for a compiler that traces the whole step and merges the copies itself. `room`: the buffer for
    their gradients.
    """
    if traced:
        return views_of(rows, layout, rounded)
    return dict(zip(layout.names, _Parts.apply(rows, layout, rounded, room or GradientBuffer()), strict=True))


def views_of(rows: Tensor, layout: Layout, rounded: Collection[str]) -> dict[str, Tensor]:
    views = layout.views(rows)
    if rounded:
        views |= {name: part for name, part in layout.views(rows.bfloat16()).items() if name in rounded}
    return views
