"""Out of a vmap over clients for a while, to compute with the tensors of all of them at once.

An `autograd.Function` with a rule for vmap does the same, and takes a millisecond of Python for each call: in
a small model's step that is a tenth of it. Gradients are those of what is computed outside, and taken around
the vmap.
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

# Of how many axes lead, as in (clients, …), (runs, clients, …) or (clients, examples, …), and of tensors that
# have these.
Kernel = Callable[..., Tensor]
Axes = tuple[int | None, ...]  # of each tensor the one that a vmap maps over; None: it is the same for all
Rule = Callable[[Sequence[Tensor], Axes], tuple[Tensor, ...]]


def is_mapped() -> bool:
    """Whether a vmap is around."""
    return bool(torch._C._are_functorch_transforms_active())


def one_out(rule: Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What `rule` makes of whole tensors outside the innermost vmap. Where that maps over any of them, what
    it returns has that axis first."""
    interpreter = peek_interpreter_stack()
    if interpreter.key() != TransformType.Vmap:
        raise RuntimeError("Within a gradient nothing is computed outside: it would not be followed there.")
    level = interpreter.level()
    whole, axes = zip(*(_unwrap_batched(tensor, level) for tensor in tensors), strict=True)
    inner = pop_dynamic_layer_stack()
    try:
        found = rule(whole, axes)
    finally:
        push_dynamic_layer_stack(inner)
    return tuple(_add_batch_dim(each, 0, level) for each in found) if is_any(axes) else found


def is_any(axes: Sequence[int | None]) -> bool:
    """Whether a vmap maps over any."""
    return any(axis is not None for axis in axes)


def stacked(kernel: Kernel, *tensors: Tensor) -> Tensor:
    """Of these, for all clients at once."""
    return _stacked(kernel, 0, tensors)


def _stacked(kernel: Kernel, lead: int, tensors: Sequence[Tensor]) -> Tensor:
    if not is_mapped():
        # What is the same for all clients, such as the round's own model of what no row says: as of one.
        return kernel(lead, *tensors) if lead else kernel(1, *(t.unsqueeze(0) for t in tensors)).squeeze(0)

    def rule(whole: Sequence[Tensor], axes: Axes) -> tuple[Tensor]:
        if not is_any(axes):
            return (_stacked(kernel, lead, whole),)
        both = list(zip(whole, axes, strict=True))
        size = next(each.shape[axis] for each, axis in both if axis is not None)
        first = [
            each.expand(size, *each.shape) if axis is None else each.movedim(axis, 0) for each, axis in both
        ]
        return (_stacked(kernel, lead + 1, first),)

    return one_out(rule, *tensors)[0]
