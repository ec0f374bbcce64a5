"""GPU kernels, in Triton, for the operations of private steps on large arrays, each of which is read once.

torch takes twenty passes to turn the words of a cipher into Gaussians, and reads gradients at a third of the
GPU's memory bandwidth.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfrozen_app.vmap.row_kernels import square_sums

TILE = 1024  # Gaussians that a program computes together
MANY, WIDE = 8, 512  # examples, and numbers of each, that a program weights together


@triton.jit(do_not_specialize=["pairs", "count", "words_step", "out_step"])
def _gaussians(  # type: ignore[no-untyped-def]
    words, out, pairs, count, words_step, out_step,
    TERMS: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < pairs
    cosines = tl.zeros((TILE,), dtype=tl.float64)
    sines = tl.zeros((TILE,), dtype=tl.float64)
    for term in range(TERMS):
        at = words + stream * words_step + term * pairs + place
        near = (tl.load(at, mask=there, other=0) >> 11) & 0x1FFFFFFFFFFFFF
        turn = (tl.load(at + TERMS * pairs, mask=there, other=0) >> 11) & 0x1FFFFFFFFFFFFF
        radius = tl.sqrt(-2.0 * tl.log((near.to(tl.float64) + 1.0) * 2.0**-53))
        angle = turn.to(tl.float64) * tl.full((TILE,), TURN, dtype=tl.float64)
        cosines += radius * tl.cos(angle)
        sines += radius * tl.sin(angle)
    out += stream * out_step
    scale = tl.full((TILE,), 1.0 / TERMS, dtype=tl.float64)
    tl.store(out + place, cosines * tl.sqrt(scale), mask=there & (place < count))
    tl.store(out + pairs + place, sines * tl.sqrt(scale), mask=there & (pairs + place < count))


@triton.jit(do_not_specialize=["examples"])
def _add_weighed(  # type: ignore[no-untyped-def]
    rows, factors, out, examples, width, out_step, MANY: tl.constexpr, WIDE: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    there = column < width
    rows += client * examples * width
    total = tl.zeros((MANY, WIDE), dtype=tl.float32)
    for first in range(0, examples, MANY):
        example = first + tl.arange(0, MANY)
        real = example < examples
        factor = tl.load(factors + client * examples + example, mask=real, other=0.0)[:, None]
        at = rows + example.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(at, mask=real[:, None] & there[None, :], other=0.0)
        total += tl.where(factor != 0.0, factor * value, 0.0)
    at = out + client * out_step + column
    tl.store(at, tl.load(at, mask=there, other=0.0) + tl.sum(total, axis=0), mask=there)


def gaussians(words: Tensor, out: Tensor, terms: int) -> None:
    """(streams, words) of 64 bits each -> (streams, count) Gaussians of variance 1, each from `terms`
    terms."""
    streams, count = out.shape
    pairs = words.shape[1] // (2 * terms)
    grid = (triton.cdiv(pairs, TILE), streams)
    steps = words.stride(0), out.stride(0)
    _gaussians[grid](words, out, pairs, count, *steps, TERMS=terms, TURN=2 * math.pi * 2.0**-53, TILE=TILE)


def norms(rows: Tensor) -> Tensor:
    """(…, width) -> (…)"""
    return square_sums(rows.contiguous().flatten(0, -2), rows.dtype).sqrt_().view(rows.shape[:-1])


def add_weighed(out: Tensor, factors: Tensor, rows: Tensor) -> None:
    """(clients, width) += the sum of (clients, examples, width) by (clients, examples). A row with factor 0
    adds nothing, even if it is not finite."""
    clients, examples, width = rows.shape
    given = (rows.contiguous(), factors.contiguous(), out, examples, width, out.stride(0))
    _add_weighed[(triton.cdiv(width, WIDE), clients)](*given, MANY=MANY, WIDE=WIDE)


def self_test(device: torch.device) -> None:
    """Run each kernel once, so that a compiler error shows before a step needs it."""
    rows = torch.ones(1, 2, 4, device=device)
    norms(rows)
    add_weighed(torch.zeros(1, 4, device=device), rows[:, :, 0], rows)
    gaussians(
        torch.zeros(1, 16, dtype=torch.int64, device=device),
        torch.empty(1, 4, dtype=torch.float64, device=device),
        terms=4,
    )
