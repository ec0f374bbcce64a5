"""GPU kernels, in Triton, for convolutions with per-client weights: implicit matrix products.

Explicit patches are many times larger than the images, and writing them takes longer than the product. Here
each program gathers its own patches: in channels-last images, what one row of a convolution kernel covers is
contiguous. Sums are computed in pieces and in a fixed order, so that they are reproducible to the bit.

Tensor cores read bf16 in any layout and TF32 in one only, which gradients do not have. So float32 numbers are
passed as two or three bf16 summands, written in the same pass that produces the numbers.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from fedfrozen_app.vmap.convolution import TOGETHER
from fedfrozen_app.vmap.devices import is_exact
from fedfrozen_app.vmap.row_kernels import TILE, cut, side

# Tile sizes (places, numbers of a kernel's row, channels): the fastest on an H200 with 50 clients, 10 images
# of 30 x 30 and 32 to 64 channels.
THERE = (128, 32, 64)
GRADIENTS = (32, 128, 64)
UPPER_HALF = -65536  # mask of the upper half of a float32's bits, its bf16 part
Size = tuple[int, ...]  # of a convolution: (tall, wide, channels, out, rows of padding, columns of it)


@triton.jit
def _product(total, a, b, a2, b2, a3, b3, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + a · b, each the sum of COUNT summands. The smallest products come first; the sum of three is
    added separately, because tensor cores truncate small terms of a large sum."""
    if COUNT == 1:
        total = tl.dot(a, b, total)
    elif COUNT == 2:
        total = tl.dot(a, b2, total)
        total = tl.dot(a2, b, total)
        total = tl.dot(a, b, total)
    else:
        part = tl.dot(a3, b)
        part = tl.dot(a, b3, part)
        part = tl.dot(a2, b2, part)
        part = tl.dot(a2, b, part)
        part = tl.dot(a, b2, part)
        part = tl.dot(a, b, part)
        total += part
    return total


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "count", "above", "left"])
def _convolve(  # type: ignore[no-untyped-def]
    pictures, pictures2, pictures3, kernels, kernels2, kernels3, out,
    H, W, OH, OW, count, above, left, CI, CO,
    TALL: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
    PLACES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    span = WIDE * CI
    seen_from = client * (count // (OH * OW)) * H * W * CI
    kernels_from = client * TALL * span * CO
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    picture, within = place // (OH * OW), place % (OH * OW)
    y, x = within // OW - above, within % OW - left
    real = place < count
    total = tl.zeros((PLACES, ACROSS), dtype=tl.float32)
    for ky in range(TALL):
        row = y + ky
        start = seen_from + ((picture * H + row) * W + x) * CI
        for first in range(0, span, ALONG):
            along = first + tl.arange(0, ALONG)
            there = real[:, None] & (along < span)[None, :]
            if PADDED:
                column = x[:, None] + (along // CI)[None, :]
                there &= ((row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W)
            known = (channel < CO)[:, None] & (along < span)[None, :]
            at = start[:, None] + along[None, :]
            its = kernels_from + channel[:, None] * (TALL * span) + (ky * span + along)[None, :]
            a = tl.load(pictures + at, mask=there, other=0.0)
            b = tl.trans(tl.load(kernels + its, mask=known, other=0.0))
            a2, b2, a3, b3 = a, b, a, b
            if COUNT > 1:
                a2 = tl.load(pictures2 + at, mask=there, other=0.0)
                b2 = tl.trans(tl.load(kernels2 + its, mask=known, other=0.0))
            if COUNT > 2:
                a3 = tl.load(pictures3 + at, mask=there, other=0.0)
                b3 = tl.trans(tl.load(kernels3 + its, mask=known, other=0.0))
            total = _product(total, a, b, a2, b2, a3, b3, COUNT)
    found = total.to(out.dtype.element_ty)
    at = out + (client * count + place)[:, None] * CO + channel[None, :]
    tl.store(at, found, mask=real[:, None] & (channel < CO)[None, :])


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "count", "above", "left", "clients", "share"])
def _correlate(  # type: ignore[no-untyped-def]
    pictures, pictures2, pictures3, gradients, gradients2, gradients3, out,
    H, W, OH, OW, count, above, left, CI, CO, clients, share,
    TALL: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
    PLACES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    piece, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    span = WIDE * CI
    cuts = tl.cdiv(span, ALONG)
    ky = tl.program_id(0) % TALL
    along = (tl.program_id(0) // TALL % cuts) * ALONG + tl.arange(0, ALONG)
    channel = (tl.program_id(0) // (TALL * cuts)) * ACROSS + tl.arange(0, ACROSS)
    seen_from = client * (count // (OH * OW)) * H * W * CI
    total = tl.zeros((ACROSS, ALONG), dtype=tl.float32)
    for first in range(piece * share, min((piece + 1) * share, count), PLACES):
        place = first + tl.arange(0, PLACES)
        real = place < count
        picture, within = place // (OH * OW), place % (OH * OW)
        row, x = within // OW - above + ky, within % OW - left
        start = seen_from + ((picture * H + row) * W + x) * CI
        there = real[:, None] & (along < span)[None, :]
        if PADDED:
            column = x[:, None] + (along // CI)[None, :]
            there &= ((row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W)
        known = real[:, None] & (channel < CO)[None, :]
        its = (client * count + place)[:, None] * CO + channel[None, :]
        at = start[:, None] + along[None, :]
        a = tl.trans(tl.load(gradients + its, mask=known, other=0.0))
        b = tl.load(pictures + at, mask=there, other=0.0)
        a2, b2, a3, b3 = a, b, a, b
        if COUNT > 1:
            a2 = tl.trans(tl.load(gradients2 + its, mask=known, other=0.0))
            b2 = tl.load(pictures2 + at, mask=there, other=0.0)
        if COUNT > 2:
            a3 = tl.trans(tl.load(gradients3 + its, mask=known, other=0.0))
            b3 = tl.load(pictures3 + at, mask=there, other=0.0)
        total = _product(total, a, b, a2, b2, a3, b3, COUNT)
    out += (piece * clients + client) * TALL * span * CO
    at = out + channel[:, None] * (TALL * span) + (ky * span + along)[None, :]
    tl.store(at, total, mask=(channel < CO)[:, None] & (along < span)[None, :])


@triton.jit
def _cut_up(numbers, first, second, third, size, COUNT: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    there = at < size
    rest = tl.load(numbers + at, mask=there, other=0.0)
    upper = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)  # UPPER_HALF
    tl.store(first + at, upper.to(tl.bfloat16), mask=there)
    rest -= upper
    if COUNT > 2:
        upper = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        tl.store(second + at, upper.to(tl.bfloat16), mask=there)
        tl.store(third + at, (rest - upper).to(tl.bfloat16), mask=there)
    else:
        tl.store(second + at, rest.to(tl.bfloat16), mask=there)


def summands(numbers: Tensor, *, traced: bool = False) -> list[Tensor]:
    """bf16 summands of these numbers: up to 16 bits if TF32 is allowed, which would keep 11, otherwise all
    24. `traced`: for a compiler, which fuses them with the numbers' computation; by bit operations, because
    it would undo casts."""
    if numbers.dtype == torch.bfloat16:
        return [numbers]
    count = 3 if is_exact() else 2
    if not traced:
        found = [torch.empty_like(numbers, dtype=torch.bfloat16) for _ in range(count)]
        size = numbers.numel()
        _cut_up[(triton.cdiv(size, TILE),)](numbers, *_three(found), size, count, TILE)
        return found
    found = []
    for _ in range(count - 1):
        upper = (numbers.view(torch.int32) & UPPER_HALF).view(torch.float32)
        found.append(upper.bfloat16())
        numbers = numbers - upper
    return [*found, numbers.bfloat16()]


class Convolved(torch.autograd.Function):
    """(clients, batch, rows, columns, channels), and (clients, out, tall, wide, channels) of kernels ->
    (clients, batch, …, out). `padding`: rows above and below, columns left and right."""

    @staticmethod
    def forward(
        ctx: Any, pictures: Tensor, kernels: Tensor, padding: tuple[int, int], traced: bool = False
    ) -> Tensor:
        ctx.summands, ctx.channels = partial(summands, traced=traced), pictures.shape[-1]
        if spare := -ctx.channels % TOGETHER:  # padding by zero would still copy all of it in torch
            pictures, kernels = pad(pictures, (0, spare)), pad(kernels, (0, spare))
        pictures, kernels = pictures.contiguous(), kernels.contiguous()
        seen = ctx.summands(pictures)
        ctx.save_for_backward(kernels, *seen)
        ctx.padding, ctx.size = list(padding), kernels.shape[2:4]
        return convolve(seen, ctx.summands(kernels), list(padding), pictures.dtype)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernels, *seen = ctx.saved_tensors
        (tall, wide), (above, left) = ctx.size, ctx.padding
        back = ctx.summands(gradients.contiguous())
        by_pictures = by_kernels = None
        if ctx.needs_input_grad[0]:  # the gradient of the input is a convolution with the flipped kernel
            turned = ctx.summands(kernels.flip(2, 3).transpose(1, 4).contiguous())
            by_pictures = convolve(back, turned, [tall - 1 - above, wide - 1 - left], gradients.dtype)
            by_pictures = by_pictures[..., : ctx.channels]
        if ctx.needs_input_grad[1]:
            by_kernels = correlate(seen, back, [tall, wide], ctx.padding).to(kernels.dtype)
            by_kernels = by_kernels[..., : ctx.channels]
        return by_pictures, by_kernels, None, None


@torch.library.custom_op("fedfrozen::convolve", mutates_args=())  # a compiler sees one operation
def convolve(
    pictures: Sequence[Tensor], kernels: Sequence[Tensor], padding: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The convolution of summands, in this type."""
    out = _empty_output(pictures, kernels, padding, dtype)
    clients, batch, height, width, channels = pictures[0].shape
    _, out_channels, tall, wide, _ = kernels[0].shape
    _, _, rows, columns, _ = out.shape
    count, summed = batch * rows * columns, len(pictures)
    places, most, across = THERE
    across, along = side(out_channels, across), side(wide * channels, most)
    grid = (triton.cdiv(count, places), triton.cdiv(out_channels, across), clients)
    sizes = (height, width, rows, columns, count, *padding, channels, out_channels)
    how = (tall, wide, any(padding), summed, places, along, across)
    given = (*_three(pictures), *_three(kernels), out)
    _convolve[grid](*given, *sizes, *how, num_warps=4, num_stages=2 if summed > 2 else 3)
    return out


@convolve.register_fake
def _empty_output(
    pictures: Sequence[Tensor], kernels: Sequence[Tensor], padding: Sequence[int], dtype: torch.dtype
) -> Tensor:
    clients, batch, height, width, _ = pictures[0].shape
    _, out_channels, tall, wide, _ = kernels[0].shape
    rows, columns = height + 2 * padding[0] - tall + 1, width + 2 * padding[1] - wide + 1
    return pictures[0].new_empty(clients, batch, rows, columns, out_channels, dtype=dtype)


@torch.library.custom_op("fedfrozen::correlate", mutates_args=())
def correlate(
    pictures: Sequence[Tensor], gradients: Sequence[Tensor], size: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """(clients, out, tall, wide, channels) the gradient of the convolution kernels, from
    summands."""
    clients, batch, height, width, channels = pictures[0].shape
    rows, columns, out_channels = gradients[0].shape[2:]
    tall, wide = size
    places, most, across = GRADIENTS
    count, summed = batch * rows * columns, len(pictures)
    along, across = side(wide * channels, most), side(out_channels, across)
    tiles = tall * triton.cdiv(wide * channels, along) * triton.cdiv(out_channels, across)
    pieces, share = cut(clients * tiles, count, places)
    shape = (pieces, clients, out_channels, tall, wide, channels)
    out = torch.empty(shape, dtype=torch.float32, device=pictures[0].device)
    sizes = (height, width, rows, columns, count, *padding, channels, out_channels, clients, share)
    how = (tall, wide, any(padding), summed, places, along, across)
    given = (*_three(pictures), *_three(gradients), out)
    _correlate[(tiles, pieces, clients)](*given, *sizes, *how, num_warps=4, num_stages=3 if summed > 2 else 4)
    return out.sum(dim=0)


@correlate.register_fake
def _empty_gradients(
    pictures: Sequence[Tensor], gradients: Sequence[Tensor], size: Sequence[int], padding: Sequence[int]
) -> Tensor:
    shape = (len(pictures[0]), gradients[0].shape[-1], *size, pictures[0].shape[-1])
    return pictures[0].new_empty(shape, dtype=torch.float32)


def _three(summed: Sequence[Tensor]) -> Sequence[Tensor]:
    """The GPU kernels take three summands, and do not read those that are missing."""
    return [*summed, *(summed[0] for _ in range(3 - len(summed)))]


def trials(device: torch.device, sizes: Collection[Size], dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Calls that each compile one GPU kernel, for convolutions of these sizes."""
    works: dict[Any, Callable[[], Any]] = {}
    (_, most, across), (_, widest, highest) = THERE, GRADIENTS
    for tall, wide, channels, out, above, left in sizes:
        channels += -channels % TOGETHER
        padding, back = [above, left], [tall - 1 - above, wide - 1 - left]
        before = summands(torch.zeros(1, 1, tall, wide, channels, dtype=dtype, device=device))
        kernels = torch.zeros(1, out, tall, wide, channels, dtype=dtype, device=device)
        turned = summands(kernels.transpose(1, 4).contiguous())
        after = summands(torch.zeros(1, 1, 1 + 2 * above, 1 + 2 * left, out, dtype=dtype, device=device))
        shapes = (tall, wide, channels % 16, out % 16)
        like = (*shapes, side(wide * channels, most), side(out, across))
        other = (*shapes, side(wide * out, most), side(channels, across))
        gradients = (*shapes, side(wide * channels, widest), side(out, highest))
        works["there", like, any(padding)] = partial(convolve, before, summands(kernels), padding, dtype)
        works["back", other, any(back)] = partial(convolve, after, turned, back, dtype)
        works["gradients", gradients, any(padding)] = partial(correlate, before, after, [tall, wide], padding)
    return list(works.values())
