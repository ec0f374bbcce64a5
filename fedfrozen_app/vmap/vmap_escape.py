"""Leave a vmap over clients temporarily, to compute with the stacked tensors of all of them.

An `autograd.Function` with a rule for vmap does the same, but takes a millisecond of Python for each call: a
tenth of a small model's step. Gradients must be taken around the vmap.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)

# Takes the number of leading axes, as in (clients, …), (runs, clients, …) or (clients, examples, …), and the
# tensors with these axes.
StackedFunction = Callable[..., Tensor]
Axes = tuple[int | None, ...]  # for each tensor the axis that a vmap maps over; None: it is not mapped
Rule = Callable[[Sequence[Tensor], Axes], tuple[Tensor, ...]]


class NestedGradientError(RuntimeError):
    """A gradient inside the vmap, which would not include computations outside it."""


def is_mapped() -> bool:
    """Whether this runs inside a vmap."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_vmap(rule: Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `rule` to the stacked tensors outside the innermost vmap. If that maps over any of them, the
    results have the mapped axis first."""
    interpreter = peek_interpreter_stack()
    if interpreter.key() != TransformType.Vmap:
        raise NestedGradientError("Do not take gradients inside this vmap: take them around it.")
    level = interpreter.level()
    whole, axes = zip(*(_unwrap_batched(tensor, level) for tensor in tensors), strict=True)
    inner = pop_dynamic_layer_stack()
    try:
        found = rule(whole, axes)
    finally:
        push_dynamic_layer_stack(inner)
    return tuple(_add_batch_dim(each, 0, level) for each in found) if any_mapped(axes) else found


def any_mapped(axes: Sequence[int | None]) -> bool:
    """Whether a vmap maps over any of them."""
    return any(axis is not None for axis in axes)


def stacked(function: StackedFunction, *tensors: Tensor) -> Tensor:
    """Call `function` once with the stacked tensors of all clients."""
    return _stacked(function, 0, tensors)


def _stacked(function: StackedFunction, lead: int, tensors: Sequence[Tensor]) -> Tensor:
    if not is_mapped():
        # Not mapped: equal for all clients, so it is computed once.
        return (
            function(lead, *tensors) if lead else function(1, *(t.unsqueeze(0) for t in tensors)).squeeze(0)
        )

    def rule(whole: Sequence[Tensor], axes: Axes) -> tuple[Tensor]:
        if not any_mapped(axes):
            return (_stacked(function, lead, whole),)
        both = list(zip(whole, axes, strict=True))
        size = next(each.shape[axis] for each, axis in both if axis is not None)
        first = [
            each.expand(size, *each.shape) if axis is None else each.movedim(axis, 0) for each, axis in both
        ]
        return (_stacked(function, lead + 1, first),)

    return outside_vmap(rule, *tensors)[0]
