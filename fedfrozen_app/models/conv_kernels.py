"""GPU kernels, in Triton, for convolutions of which every client has its own: products without patches.

Patches as rows are the kernel's places times as large as the pictures, and writing them takes longer than the
product. Here each program gathers its own: in pictures whose channels come last, what one row of a kernel
sees lies together. Sums are made in pieces and in a fixed order, so that they repeat to the bit.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfrozen_app.models.row_kernels import cut, is_exact, side

# Places, numbers of a kernel's row and channels that a program looks at together: those that were quickest on
# an H200 with 50 clients, 10 pictures of 30 x 30 and 32 to 64 channels.
PLACES, ALONG, ACROSS = 128, 32, 64
Size = tuple[int, ...]  # of a convolution: (tall, wide, channels, out, rows of padding, columns of it)


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "count", "above", "left"])
def _convolve(  # type: ignore[no-untyped-def]
    pictures, kernels, out, H, W, OH, OW, count, above, left, CI, CO,
    TALL: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr,
    PLACES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    pictures += client * (count // (OH * OW)) * H * W * CI
    kernels += client * TALL * WIDE * CI * CO
    out += client * count * CO
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    picture, within = place // (OH * OW), place % (OH * OW)
    y, x = within // OW - above, within % OW - left
    real = place < count
    span = WIDE * CI
    total = tl.zeros((PLACES, ACROSS), dtype=tl.float32)
    for ky in range(TALL):
        row = y + ky
        start = ((picture * H + row) * W + x) * CI
        for first in range(0, span, ALONG):
            along = first + tl.arange(0, ALONG)
            there = real[:, None] & (along < span)[None, :]
            if PADDED:
                column = x[:, None] + (along // CI)[None, :]
                there &= ((row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W)
            seen = tl.load(pictures + start[:, None] + along[None, :], mask=there, other=0.0)
            known = (along < span)[:, None] & (channel < CO)[None, :]
            kernel = tl.load(
                kernels + (ky * span + along)[:, None] * CO + channel[None, :], mask=known, other=0.0
            )
            total = tl.dot(seen, kernel, total, input_precision="tf32x3" if EXACT else "tf32")
    found = total.to(out.dtype.element_ty)
    tl.store(
        out + place[:, None] * CO + channel[None, :], found, mask=real[:, None] & (channel < CO)[None, :]
    )


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "count", "above", "left", "clients", "share"])
def _correlate(  # type: ignore[no-untyped-def]
    pictures, slopes, out, H, W, OH, OW, count, above, left, CI, CO, clients, share,
    TALL: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr,
    PLACES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    piece, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    span = WIDE * CI
    cuts = tl.cdiv(span, ALONG)
    ky = tl.program_id(0) % TALL
    along = (tl.program_id(0) // TALL % cuts) * ALONG + tl.arange(0, ALONG)
    channel = (tl.program_id(0) // (TALL * cuts)) * ACROSS + tl.arange(0, ACROSS)
    pictures += client * (count // (OH * OW)) * H * W * CI
    slopes += client * count * CO
    out += (piece * clients + client) * TALL * span * CO
    total = tl.zeros((ALONG, ACROSS), dtype=tl.float32)
    for first in range(piece * share, min((piece + 1) * share, count), PLACES):
        place = first + tl.arange(0, PLACES)
        real = place < count
        picture, within = place // (OH * OW), place % (OH * OW)
        row, x = within // OW - above + ky, within % OW - left
        start = ((picture * H + row) * W + x) * CI
        there = real[:, None] & (along < span)[None, :]
        if PADDED:
            column = x[:, None] + (along // CI)[None, :]
            there &= ((row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W)
        seen = tl.load(pictures + start[:, None] + along[None, :], mask=there, other=0.0)
        known = real[:, None] & (channel < CO)[None, :]
        slope = tl.load(slopes + place[:, None] * CO + channel[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(seen), slope, total, input_precision="tf32x3" if EXACT else "tf32")
    known = (along < span)[:, None] & (channel < CO)[None, :]
    tl.store(out + (ky * span + along)[:, None] * CO + channel[None, :], total, mask=known)


class Convolved(torch.autograd.Function):
    """(clients, batch, rows, columns, channels), and (clients, tall, wide, channels, out) of kernels ->
    (clients, batch, …, out). `padding`: rows above and below, columns left and right."""

    @staticmethod
    def forward(ctx: Any, pictures: Tensor, kernels: Tensor, padding: tuple[int, int]) -> Tensor:
        pictures, kernels = pictures.contiguous(), kernels.contiguous()
        ctx.save_for_backward(pictures, kernels)
        ctx.padding = padding
        return convolve(pictures, kernels, padding)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        pictures, kernels = ctx.saved_tensors
        slopes = slopes.contiguous()
        by_pictures = by_kernels = None
        if ctx.needs_input_grad[0]:  # what a place has put out goes back to where it came from
            turned = kernels.flip(1, 2).transpose(3, 4).contiguous()
            tall, wide = kernels.shape[1:3]
            above, left = ctx.padding
            by_pictures = convolve(slopes, turned, (tall - 1 - above, wide - 1 - left))
        if ctx.needs_input_grad[1]:
            by_kernels = correlate(pictures, slopes, kernels.shape[1:3], ctx.padding).to(kernels.dtype)
        return by_pictures, by_kernels, None


def convolve(pictures: Tensor, kernels: Tensor, padding: tuple[int, int]) -> Tensor:
    clients, batch, height, width, channels = pictures.shape
    _, tall, wide, _, out_channels = kernels.shape
    rows, columns = height + 2 * padding[0] - tall + 1, width + 2 * padding[1] - wide + 1
    out = pictures.new_empty(clients, batch, rows, columns, out_channels)
    count = batch * rows * columns
    exact, across = is_exact(), side(out_channels, ACROSS)
    places = PLACES if exact else 2 * PLACES
    grid = (triton.cdiv(count, places), triton.cdiv(out_channels, across), clients)
    sizes = (height, width, rows, columns, count, *padding, channels, out_channels)
    along = side(wide * channels, ALONG)
    how = (tall, wide, any(padding), exact, places, along, across)
    _convolve[grid](pictures, kernels, out, *sizes, *how, num_warps=4, num_stages=3 if exact else 2)
    return out


def correlate(pictures: Tensor, slopes: Tensor, size: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """(clients, tall, wide, channels, out) how much each number of a kernel adds to what is put out."""
    clients, batch, height, width, channels = pictures.shape
    rows, columns, out_channels = slopes.shape[2:]
    tall, wide = size
    count, places = batch * rows * columns, PLACES // 2
    along, across = side(wide * channels, ALONG), side(out_channels, ACROSS)
    tiles = tall * triton.cdiv(wide * channels, along) * triton.cdiv(out_channels, across)
    pieces, share = cut(clients * tiles, count, places)
    shape = (pieces, clients, tall, wide, channels, out_channels)
    out = torch.empty(shape, dtype=torch.float32, device=pictures.device)
    sizes = (height, width, rows, columns, count, *padding, channels, out_channels, clients, share)
    how = (tall, wide, any(padding), is_exact(), places, along, across)
    _correlate[(tiles, pieces, clients)](pictures, slopes, out, *sizes, *how, num_warps=4, num_stages=2)
    return out.sum(dim=0)


def trials(device: torch.device, sizes: Collection[Size], dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Works that each make one kernel, for convolutions of these sizes."""
    works: dict[Any, Callable[[], Any]] = {}
    for tall, wide, channels, out, above, left in sizes:
        padding, back = (above, left), (tall - 1 - above, wide - 1 - left)
        before = torch.zeros(1, 1, tall, wide, channels, dtype=dtype, device=device)
        kernels = torch.zeros(1, tall, wide, channels, out, dtype=dtype, device=device)
        after = torch.zeros(1, 1, 1 + 2 * above, 1 + 2 * left, out, dtype=dtype, device=device)
        turned = kernels.transpose(3, 4).contiguous()
        like = (tall, wide, side(wide * channels, ALONG), side(out, ACROSS), channels % 16, out % 16)
        other = (tall, wide, side(wide * out, ALONG), side(channels, ACROSS), out % 16, channels % 16)
        works["there", like, any(padding)] = partial(convolve, before, kernels, padding)
        works["there", other, any(back)] = partial(convolve, after, turned, back)
        works["slopes", like, any(padding)] = partial(correlate, before, after, (tall, wide), padding)
    return list(works.values())
