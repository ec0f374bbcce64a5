"""Linear layers and embeddings for code that runs under `vmap` over their weights, with gradients around it.

Two things are slow there. torch's own rules return transposed weight gradients, which are then copied. And
for per-example gradients, as in DP-SGD, the weights would be copied for each example, although all examples
of a client share them. Here such weights are stored once, there is one product per client, and gradients have
the layout of the weights.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.vmap import factored_gradients
from fedfrozen_app.vmap.model_modes import with_forwards
from fedfrozen_app.vmap.vmap_escape import stacked


def per_client_products(model: nn.Module, trained: Collection[str]) -> AbstractContextManager[None]:
    """Within the block linear layers and embeddings that train are computed as described above."""
    if not trained:
        return nullcontext()
    return with_forwards(
        {
            module: partial(WAYS[type(module)], module)
            for name, module in model.named_modules()
            if type(module) in WAYS and f"{name}.weight" in trained and _is_plain(module)
        }
    )


def _is_plain(module: Any) -> bool:
    return type(module) is not nn.Embedding or (module.max_norm is None and not module.scale_grad_by_freq)


def _linear(module: nn.Linear, rows: Tensor) -> Tensor:
    found = product_per_client(rows, module.weight)
    return found if module.bias is None else found + module.bias.to(found.dtype)


def _turned_linear(module: Conv1D, rows: Tensor) -> Tensor:
    found = product_per_client(rows, module.weight.mT)
    return found + module.bias.to(found.dtype)


def _embedding(module: nn.Embedding, index: Tensor) -> Tensor:
    return stacked(partial(_looked_up, module.padding_idx), index, module.weight)


WAYS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    Conv1D: _turned_linear,
    nn.Embedding: _embedding,
}


def product_per_client(rows: Tensor, weight: Tensor) -> Tensor:
    """rows · weightᵀ, of (…, in) and (out, in)."""
    if torch.is_autocast_enabled(rows.device.type):  # autocast does not recognise this as a product
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    return stacked(_Product.apply, rows, weight)


def by_client(lead: int, weight: Tensor) -> tuple[Tensor, int]:
    """(clients, …) of weights with `lead` leading axes, and the number of examples that share each."""
    if lead > 1 and weight.stride(lead - 1) == 0:
        return weight.select(lead - 1, 0).flatten(0, lead - 2), weight.shape[lead - 1]
    return weight.flatten(0, lead - 1), 1


class GradientBuffer:
    """The memory for the gradient of a matrix of clients' rows. A product writes its weights' gradient there
    directly, instead of into an array that would be copied."""

    def __init__(self, *, rounded_only: bool = False) -> None:
        """`rounded_only`: for rows that are also read directly, and so have a separate gradient."""
        self._rounded_only = rounded_only
        self._storages: set[int] = set()
        self._written: set[int] = set()
        self._placeholders: dict[torch.dtype, Tensor] = {}
        self._whole: Tensor | None = None
        self._rows = torch.empty(0)

    def begin(self, rows: Tensor, parts: Iterable[Tensor]) -> None:
        """Start with these parts of the rows, (clients, width), or of the rounded rows: each has the offset
        of its gradient."""
        self._rows = rows
        kept = [part for part in parts if not (self._rounded_only and part.dtype == rows.dtype)]
        self._storages = {part.untyped_storage().data_ptr() for part in kept}

    @property
    def whole(self) -> Tensor:
        """(clients, width)"""
        if self._whole is None:
            self._whole = torch.empty_like(self._rows)
        return self._whole

    def place(self, part: Tensor) -> Tensor | None:
        """The memory for this part's gradient; None if it is already used, or the part is not in the rows."""
        offset = int(part.storage_offset())
        if part.untyped_storage().data_ptr() not in self._storages or offset in self._written:
            return None
        self._written.add(offset)
        return self.whole.as_strided(part.shape, part.stride(), offset)

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A placeholder for a gradient that is written already."""
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.zeros((), dtype=dtype, device=self._rows.device)
        return self._placeholders[dtype].expand(*shape)

    @property
    def is_used(self) -> bool:
        return bool(self._written)

    def is_written(self, place: Tensor) -> bool:
        return place.storage_offset() in self._written

    def is_placeholder(self, gradient: Tensor) -> bool:
        return any(gradient.data_ptr() == each.data_ptr() for each in self._placeholders.values())


_buffer: ContextVar[GradientBuffer | None] = ContextVar("gradient_buffer", default=None)


@contextmanager
def offered(buffer: GradientBuffer | None) -> Iterator[None]:
    """Within the block products write their weight gradients into this buffer."""
    before = _buffer.set(buffer)
    try:
        yield
    finally:
        _buffer.reset(before)


class _Product(torch.autograd.Function):
    """(*lead, …, in) and (*lead, out, in) -> (*lead, …, out), in the precision of the rows."""

    @staticmethod
    def forward(ctx: Any, lead: int, rows: Tensor, weight: Tensor) -> Tensor:
        own, ctx.examples = by_client(lead, weight)
        ctx.buffer = _buffer.get() if ctx.examples == 1 else None
        own = own.to(rows.dtype)  # not earlier: weights shared in memory would be copied for each
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        ctx.save_for_backward(rows, own)
        together = rows.reshape(len(own), -1, rows.shape[-1])
        ctx.factored = factored_gradients.factored_for(together, own)
        found = (
            torch.bmm(together, own.mT) if ctx.factored is None else factored_gradients.product(together, own)
        )
        return found.view(*rows.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:  # type: ignore[override]
        rows, own = ctx.saved_tensors
        gradients = gradients.to(own.dtype)
        by_rows = by_weight = None
        if ctx.needs_input_grad[1]:
            by_rows = torch.bmm(gradients.reshape(len(own), -1, own.shape[1]), own).view(rows.shape)
        if ctx.needs_input_grad[2]:
            each = len(own) * ctx.examples
            left, right = (part.reshape(each, -1, part.shape[-1]) for part in (gradients, rows))
            if ctx.factored is not None and ctx.factored.keep(own, left, right):
                return None, by_rows, None
            place = None if ctx.buffer is None else ctx.buffer.place(own)
            if place is None:
                by_weight = torch.bmm(left.mT, right).view(ctx.shape).to(ctx.dtype)
            else:
                _multiply_into(place, left.mT, right)
                by_weight = ctx.buffer.placeholder(ctx.shape, ctx.dtype)
        return None, by_rows, by_weight


def _multiply_into(place: Tensor, left: Tensor, right: Tensor) -> None:
    if place.dtype == left.dtype:
        torch.bmm(left, right, out=place)
    elif place.is_cuda:  # products of bf16 are summed in float32 anyway
        torch.bmm(left, right, out_dtype=place.dtype, out=place)
    else:
        place.copy_(torch.bmm(left, right))


def _looked_up(untrained: int | None, lead: int, index: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = _Rows.apply(lead, index, weight, untrained)
    return found


class _Rows(torch.autograd.Function):
    """(*lead, …) numbers of rows, and (*lead, rows, width) -> (*lead, …, width). The row `untrained`
    gets no gradient."""

    @staticmethod
    def forward(ctx: Any, lead: int, index: Tensor, weight: Tensor, untrained: int | None) -> Tensor:
        own, examples = by_client(lead, weight)
        ctx.shape, ctx.each, ctx.untrained = weight.shape, len(own) * examples, untrained
        ctx.save_for_backward(index)
        flat = index.reshape(len(own), -1, 1).expand(-1, -1, own.shape[2])
        return own.gather(1, flat).view(*index.shape, -1)  # an index out of range is an error

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        if ctx.untrained is not None:
            gradients = gradients.masked_fill((index == ctx.untrained).unsqueeze(-1), 0.0)
        flat = index.reshape(ctx.each, -1)
        example = torch.arange(ctx.each, device=index.device).unsqueeze(1)
        found = gradients.new_zeros(ctx.each, *ctx.shape[-2:])
        found.index_put_((example, flat), gradients.reshape(*flat.shape, -1), accumulate=True)
        return None, None, found.view(ctx.shape), None
