"""GPU kernels, in Triton, that scale or shift each client's rows by the client's own weights.

torch has such kernels for weights shared by all rows. For others it launches three kernels instead of one,
and each reads and writes everything. Sums over rows are computed in pieces and in a fixed order, so that they
are reproducible to the bit.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # pieces of work that keep a GPU busy
TILE = 2048  # numbers in one tile
NO_LIMIT = 1 << 30
LONG, PIECE = 4096, 32768  # numbers of a row whose squares a program sums at once, and in total
WIDEST = {"shift": 256, "add_up": 64}  # columns of them


@triton.jit(do_not_specialize=["count", "weight_step", "bias_step"])
def _normalise(  # type: ignore[no-untyped-def]
    rows, weight, bias, out, means, scales, count, width, weight_step, bias_step, eps,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    client, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    column = tl.arange(0, WIDE)
    real, there = place < count, column < width
    inside = real[:, None] & there[None, :]
    at = (client * count + place)[:, None] * width + column[None, :]
    value = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / width
    apart = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, axis=1) / width + eps)
    own = tl.load(weight + client * weight_step + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + client * bias_step + column, mask=there, other=0.0).to(tl.float32)
    found = apart * scale[:, None] * own[None, :] + shift[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)
    tl.store(means + client * count + place, mean, mask=real)
    tl.store(scales + client * count + place, scale, mask=real)


@triton.jit(do_not_specialize=["count", "weight_step", "share"])
def _normalise_back(  # type: ignore[no-untyped-def]
    gradients, rows, weight, means, scales, out, by_weight, by_bias, count, width, weight_step, share,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    piece, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDE)
    there = column < width
    own = tl.load(weight + client * weight_step + column, mask=there, other=0.0).to(tl.float32)
    weights = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    biases = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    for first in range(piece * share, min((piece + 1) * share, count), HIGH):
        place = first + tl.arange(0, HIGH)
        real = place < count
        inside = real[:, None] & there[None, :]
        at = (client * count + place)[:, None] * width + column[None, :]
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + client * count + place, mask=real, other=0.0)
        scale = tl.load(scales + client * count + place, mask=real, other=0.0)
        normal = tl.where(inside, (value - mean[:, None]) * scale[:, None], 0.0)
        weights += gradient * normal
        biases += gradient
        scaled = gradient * own[None, :]
        level = tl.sum(scaled, axis=1) / width
        along = tl.sum(scaled * normal, axis=1) / width
        found = (scaled - level[:, None] - normal * along[:, None]) * scale[:, None]
        tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)
    sums = (client * tl.num_programs(0) + piece) * width + column
    tl.store(by_weight + sums, tl.sum(weights, axis=0), mask=there)
    tl.store(by_bias + sums, tl.sum(biases, axis=0), mask=there)


@triton.jit(do_not_specialize=["count", "bias_step"])
def _shift(rows, bias, out, count, width, bias_step, HIGH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    client, place = tl.program_id(2).to(tl.int64), tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = column < width
    inside = (place < count)[:, None] & there[None, :]
    at = (client * count + place)[:, None] * width + column[None, :]
    value = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + client * bias_step + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, (value + shift[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "share"])
def _add_up(rows, out, count, width, share, HIGH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    piece, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = column < width
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    for first in range(piece * share, min((piece + 1) * share, count), HIGH):
        place = first + tl.arange(0, HIGH)
        inside = (place < count)[:, None] & there[None, :]
        at = (client * count + place)[:, None] * width + column[None, :]
        total += tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (client * tl.num_programs(0) + piece) * width + column, tl.sum(total, axis=0), mask=there)


@triton.jit
def _square_sums(rows, out, width, step, PIECE: tl.constexpr, LONG: tl.constexpr):  # type: ignore[no-untyped-def]
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((LONG,), dtype=out.dtype.element_ty)
    for first in range(piece * PIECE, min((piece + 1) * PIECE, width), LONG):
        column = first + tl.arange(0, LONG)
        value = tl.load(rows + row * step + column, mask=column < width, other=0.0).to(out.dtype.element_ty)
        total += value * value
    tl.store(out + row * tl.num_programs(1) + piece, tl.sum(total, axis=0))


class Normalised(torch.autograd.Function):
    """Layer norm of each row: (clients, …, width), with (clients, width) weights and biases."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        rows = rows.contiguous()
        out, means, scales = normalise(rows, weight, bias, eps, dtype)
        ctx.save_for_backward(rows, weight, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found, by_weight, by_bias = normalise_back(gradients.contiguous(), *ctx.saved_tensors)
        return found, by_weight, by_bias, None, None


class Shifted(torch.autograd.Function):
    """(clients, …, width) + (clients, width): each client's rows shifted by its own vector."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return shift(rows.contiguous(), bias)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradients, add_up(gradients.contiguous()).to(ctx.dtype)


def normalise(
    rows: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows, and each row's mean and inverse deviation."""
    clients, count, width = _sizes(rows)
    out = torch.empty_like(rows, dtype=dtype)
    means = torch.empty(clients, count, dtype=torch.float32, device=rows.device)
    scales = torch.empty_like(means)
    high, wide = _tile(width)
    steps = weight.stride(0), bias.stride(0)
    grid = (triton.cdiv(count, high), clients)
    _normalise[grid](rows, weight, bias, out, means, scales, count, width, *steps, eps, HIGH=high, WIDE=wide)
    return out, means, scales


def normalise_back(
    gradients: Tensor, rows: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for the rows, and (clients, width) for weights and biases."""
    clients, count, width = _sizes(rows)
    high, wide = _tile(width)
    pieces, share = cut(clients, count, high)
    out = torch.empty_like(rows)
    sums = torch.empty(2, clients, pieces, width, dtype=torch.float32, device=rows.device)
    given = (gradients, rows, weight, means, scales, out, sums[0], sums[1], count, width, weight.stride(0))
    _normalise_back[(pieces, clients)](*given, share, HIGH=high, WIDE=wide)
    by_weight, by_bias = sums.sum(dim=2).to(weight.dtype)
    return out, by_weight, by_bias


def shift(rows: Tensor, bias: Tensor) -> Tensor:
    clients, count, width = _sizes(rows)
    out = torch.empty_like(rows)
    high, wide = _tile(width, WIDEST["shift"])
    grid = (triton.cdiv(count, high), triton.cdiv(width, wide), clients)
    _shift[grid](rows, bias, out, count, width, bias.stride(0), HIGH=high, WIDE=wide)
    return out


def add_up(rows: Tensor) -> Tensor:
    """(clients, …, width) -> (clients, width) in float32."""
    clients, count, width = _sizes(rows)
    high, wide = _tile(width, WIDEST["add_up"])
    across = triton.cdiv(width, wide)
    pieces, share = cut(clients * across, count, high)
    sums = torch.empty(clients, pieces, width, dtype=torch.float32, device=rows.device)
    _add_up[(pieces, across, clients)](rows, sums, count, width, share, HIGH=high, WIDE=wide)
    return sums.sum(dim=1)


def square_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, width) -> (rows,), summed in this type. Rows need not be adjacent."""
    count, width = rows.shape
    pieces = triton.cdiv(width, PIECE)
    sums = torch.empty(count, pieces, dtype=dtype, device=rows.device)
    _square_sums[(count, pieces)](rows, sums, width, rows.stride(0), PIECE=PIECE, LONG=LONG)
    return sums.sum(dim=1)


def self_test(device: torch.device) -> None:
    """Run one of them, so that a compiler error shows before it is needed."""
    square_sums(torch.ones(2, 16, device=device), torch.float64)


def trials(
    device: torch.device, norms: Collection[int], others: Collection[int], products: torch.dtype
) -> list[Callable[[], Any]]:
    """Calls that each compile one GPU kernel: for layer norms of the widths `norms`, and outputs of
    `others`."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    # Two for sums of squares: rows aligned to 16 numbers, or not. They are needed at the end of the first
    # round.
    lone = zeros(2, 16)
    works: list[Callable[[], Any]] = [
        partial(square_sums, rows, torch.float64) for rows in (lone, lone[:, :10])
    ]
    for width in _unlike(norms):
        rows, own = zeros(1, 16, width), zeros(1, width)
        works.append(partial(normalise, rows, own, own, 1e-6, torch.float32))
        works.append(partial(normalise_back, rows, rows, own, rows[0, :1], rows[0, :1]))
    for width in _unlike(others, WIDEST["shift"]):
        works.append(partial(shift, zeros(1, 16, width, dtype=products), zeros(1, width, dtype=products)))
    for width in _unlike(others, WIDEST["add_up"]):
        works.append(partial(add_up, zeros(1, 16, width, dtype=products)))
    return works


def _unlike(widths: Collection[int], most: int = NO_LIMIT) -> Collection[int]:
    """One width for each distinct GPU kernel."""
    return {(_tile(width, most), width % 16 == 0): width for width in sorted(widths)}.values()


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    """Clients, rows of each, and their width."""
    clients, width = rows.shape[0], rows.shape[-1]
    return clients, rows.numel() // (clients * width), width


def _tile(width: int, most: int = NO_LIMIT) -> tuple[int, int]:
    """The numbers of rows and columns of a tile."""
    wide = min(triton.next_power_of_2(width), most)
    return max(1, TILE // wide), wide


def cut(groups: int, count: int, high: int) -> tuple[int, int]:
    """The number of pieces into which the rows of a group are cut, and the rows of each."""
    least = max(1, triton.cdiv(count, high))
    wanted = max(1, min(least, PROGRAMS // groups))
    share = triton.cdiv(least, wanted) * high
    return max(1, triton.cdiv(count, share)), share


def side(size: int, most: int = NO_LIMIT) -> int:
    """The side of a tile of a product: at least 16 for tensor cores."""
    return max(16, min(triton.next_power_of_2(size), most))
