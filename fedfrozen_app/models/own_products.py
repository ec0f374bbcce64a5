"""Linear layers and embeddings for code that runs under `vmap` over their weights, with gradients around it.

Two things cost there. Slopes of weights come turned out of torch's own rules, and are copied before anybody
reads them. And where every example is to have a slope of its own, as with private clients, weights would be
copied for each of them, though a client has one for all. Here such weights are one in memory, their product
is one for each client, and slopes lie as the weights do.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.models import thin
from fedfrozen_app.models.beyond_vmap import stacked
from fedfrozen_app.models.meanwhile import with_forwards


def own_products(model: nn.Module, trained: Collection[str]) -> AbstractContextManager[None]:
    """Within it linear layers and embeddings that train are computed as said above."""
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
    found = multiplied(rows, module.weight)
    return found if module.bias is None else found + module.bias.to(found.dtype)


def _turned_linear(module: Conv1D, rows: Tensor) -> Tensor:
    found = multiplied(rows, module.weight.mT)
    return found + module.bias.to(found.dtype)


def _embedding(module: nn.Embedding, index: Tensor) -> Tensor:
    return stacked(partial(_looked_up, module.padding_idx), index, module.weight)


WAYS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    Conv1D: _turned_linear,
    nn.Embedding: _embedding,
}


def multiplied(rows: Tensor, weight: Tensor) -> Tensor:
    """rows · weightᵀ, of (…, in) and (out, in)."""
    if torch.is_autocast_enabled(rows.device.type):  # it does not know that this is a product
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    return stacked(_Product.apply, rows, weight)


def by_client(lead: int, weight: Tensor) -> tuple[Tensor, int]:
    """(clients, …) of weights that have so many leading axes, and how many examples share each."""
    if lead > 1 and weight.stride(lead - 1) == 0:
        return weight.select(lead - 1, 0).flatten(0, lead - 2), weight.shape[lead - 1]
    return weight.flatten(0, lead - 1), 1


class Room:
    """Where the slopes of a matrix of clients' rows are written. A product puts those of its weights there
    itself, in place of an array of its own that would be copied."""

    def __init__(self, *, rounded_only: bool = False) -> None:
        """`rounded_only`: for rows that others read beside their parts, and so have slopes of their own."""
        self._rounded_only = rounded_only
        self._memories: set[int] = set()
        self._written: set[int] = set()
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._whole: Tensor | None = None
        self._rows = torch.empty(0)

    def begin(self, rows: Tensor, parts: Iterable[Tensor]) -> None:
        """For these parts of the rows, (clients, width), or of the same rows once they are rounded: each lies
        where its slopes will."""
        self._rows = rows
        kept = [part for part in parts if not (self._rounded_only and part.dtype == rows.dtype)]
        self._memories = {part.untyped_storage().data_ptr() for part in kept}

    @property
    def whole(self) -> Tensor:
        """(clients, width)"""
        if self._whole is None:
            self._whole = torch.empty_like(self._rows)
        return self._whole

    def place(self, part: Tensor) -> Tensor | None:
        """For the slopes of this part of the rows; None for whoever comes second, and what is none of it."""
        offset = int(part.storage_offset())
        if part.untyped_storage().data_ptr() not in self._memories or offset in self._written:
            return None
        self._written.add(offset)
        return self.whole.as_strided(part.shape, part.stride(), offset)

    def nothing(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What stands for slopes that are there already."""
        if dtype not in self._nothing:
            self._nothing[dtype] = torch.zeros((), dtype=dtype, device=self._rows.device)
        return self._nothing[dtype].expand(*shape)

    @property
    def is_used(self) -> bool:
        return bool(self._written)

    def is_written(self, place: Tensor) -> bool:
        return place.storage_offset() in self._written

    def is_nothing(self, slope: Tensor) -> bool:
        return any(slope.data_ptr() == each.data_ptr() for each in self._nothing.values())


_room: ContextVar[Room | None] = ContextVar("room", default=None)


@contextmanager
def offered(room: Room | None) -> Iterator[None]:
    """Within it products know of this room."""
    before = _room.set(room)
    try:
        yield
    finally:
        _room.reset(before)


class _Product(torch.autograd.Function):
    """(*lead, …, in) and (*lead, out, in) -> (*lead, …, out), in the precision of the rows."""

    @staticmethod
    def forward(ctx: Any, lead: int, rows: Tensor, weight: Tensor) -> Tensor:
        own, ctx.examples = by_client(lead, weight)
        ctx.room = _room.get() if ctx.examples == 1 else None
        own = own.to(rows.dtype)  # not before: weights that are one in memory would be copied for each
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        ctx.save_for_backward(rows, own)
        together = rows.reshape(len(own), -1, rows.shape[-1])
        ctx.thin = thin.thin_with(together, own)
        found = torch.bmm(together, own.mT) if ctx.thin is None else thin.product(together, own)
        return found.view(*rows.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, Tensor | None, Tensor | None]:  # type: ignore[override]
        rows, own = ctx.saved_tensors
        slopes = slopes.to(own.dtype)
        by_rows = by_weight = None
        if ctx.needs_input_grad[1]:
            by_rows = torch.bmm(slopes.reshape(len(own), -1, own.shape[1]), own).view(rows.shape)
        if ctx.needs_input_grad[2]:
            each = len(own) * ctx.examples
            left, right = (part.reshape(each, -1, part.shape[-1]) for part in (slopes, rows))
            if ctx.thin is not None and ctx.thin.keep(own, left, right):
                return None, by_rows, None
            place = None if ctx.room is None else ctx.room.place(own)
            if place is None:
                by_weight = torch.bmm(left.mT, right).view(ctx.shape).to(ctx.dtype)
            else:
                _multiply_into(place, left.mT, right)
                by_weight = ctx.room.nothing(ctx.shape, ctx.dtype)
        return None, by_rows, by_weight


def _multiply_into(place: Tensor, left: Tensor, right: Tensor) -> None:
    if place.dtype == left.dtype:
        torch.bmm(left, right, out=place)
    elif place.is_cuda:  # products of bf16 are summed in float32 anyway
        torch.bmm(left, right, out_dtype=place.dtype, out=place)
    else:
        place.copy_(torch.bmm(left, right))


def _looked_up(unlearnt: int | None, lead: int, index: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = _Rows.apply(lead, index, weight, unlearnt)
    return found


class _Rows(torch.autograd.Function):
    """(*lead, …) numbers of rows, and (*lead, rows, width) -> (*lead, …, width). No slope goes to the row
    `unlearnt`."""

    @staticmethod
    def forward(ctx: Any, lead: int, index: Tensor, weight: Tensor, unlearnt: int | None) -> Tensor:
        own, examples = by_client(lead, weight)
        ctx.shape, ctx.each, ctx.unlearnt = weight.shape, len(own) * examples, unlearnt
        ctx.save_for_backward(index)
        flat = index.reshape(len(own), -1, 1).expand(-1, -1, own.shape[2])
        return own.gather(1, flat).view(*index.shape, -1)  # a number that no row has is an error

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, None, Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        if ctx.unlearnt is not None:
            slopes = slopes.masked_fill((index == ctx.unlearnt).unsqueeze(-1), 0.0)
        flat = index.reshape(ctx.each, -1)
        example = torch.arange(ctx.each, device=index.device).unsqueeze(1)
        found = slopes.new_zeros(ctx.each, *ctx.shape[-2:])
        found.index_put_((example, flat), slopes.reshape(*flat.shape, -1), accumulate=True)
        return None, None, found.view(ctx.shape), None
