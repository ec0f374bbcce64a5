"""GPU kernels, in Triton, for products of many weights with few rows (vmap/factored_gradients.py).

They do little more than read the weights, and write them if they are updated. Sums are computed in pieces and
in a fixed order, so that they are reproducible to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfrozen_app.vmap.devices import is_exact
from fedfrozen_app.vmap.row_kernels import cut, side

# Tile sizes along and across: the fastest on an H200 with 50
# clients, 10 rows and 128 x 12544 weights.
THERE = (64, 128)
OFF = (128, 32)


# Triton specialises the other arguments on divisibility by 16.
@triton.jit(do_not_specialize=["count", "tiles"])
def _multiply(  # type: ignore[no-untyped-def]
    rows, weight, sums, count, width, out, step, tiles,
    EXACT: tl.constexpr, HIGH: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    piece, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, unit = tl.arange(0, HIGH), tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)
    rows += client * count * width
    weight += client * step
    total = tl.zeros((HIGH, ACROSS), dtype=tl.float32)
    for first in range(piece * tiles * ALONG, min((piece + 1) * tiles * ALONG, width), ALONG):
        along = first + tl.arange(0, ALONG)
        there = (along < width)[None, :]
        a = tl.load(
            rows + row[:, None] * width + along[None, :], mask=(row < count)[:, None] & there, other=0.0
        )
        its = weight + unit[:, None] * width + along[None, :]
        b = tl.load(its, mask=(unit < out)[:, None] & there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="tf32x3" if EXACT else "tf32")
    at = ((client * tl.num_programs(1) + piece) * count + row)[:, None] * out + unit[None, :]
    tl.store(sums + at, total, mask=(row < count)[:, None] & (unit < out)[None, :])


@triton.jit(do_not_specialize=["count", "share"])
def _subtract_product(  # type: ignore[no-untyped-def]
    weight, gradients, rows, rates, count, width, out, step, share,
    EXACT: tl.constexpr, HIGH: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    along = tl.program_id(0) * ALONG + tl.arange(0, ALONG)
    unit = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    row = tl.arange(0, HIGH)
    real, there, known = row < count, along < width, unit < out
    its = gradients + (client * count + row)[None, :] * out + unit[:, None]
    a = tl.load(its, mask=known[:, None] & real[None, :], other=0.0)
    at = rows + (client * count + row)[:, None] * width + along[None, :]
    b = tl.load(at, mask=real[:, None] & there[None, :], other=0.0)
    own = weight + client * step + unit[:, None] * width + along[None, :]
    inside = known[:, None] & there[None, :]
    before = tl.load(own, mask=inside, other=0.0)
    gradient = tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")
    tl.store(own, before - tl.load(rates + client // share) * gradient, mask=inside)


@torch.library.custom_op("fedfrozen::thin_product", mutates_args=())  # a compiler sees one operation
def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """(clients, rows, in) and (clients, out, in) -> (clients, rows, out). The weights of clients need not
    be adjacent."""
    rows = rows.contiguous()
    (clients, count, width), out = rows.shape, weight.shape[1]
    along, across = THERE
    across = side(out, across)
    columns = triton.cdiv(out, across)
    pieces, share = cut(clients * columns, width, along)
    sums = rows.new_empty(clients, pieces, count, out)
    how = (is_exact(), side(count), along, across)
    sizes = (count, width, out, weight.stride(0), share // along)
    _multiply[(columns, pieces, clients)](rows, weight, sums, *sizes, *how, num_warps=4, num_stages=3)
    return sums.sum(dim=1)


@multiply.register_fake
def _empty_output(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:2], weight.shape[1])


def subtract_product(weight: Tensor, gradients: Tensor, rows: Tensor, rates: Tensor) -> None:
    """weight −= rate · gradientsᵀ · rows. `rates`: each serves an equal share of the clients."""
    gradients, rows = gradients.contiguous(), rows.contiguous()
    (clients, count, width), out = rows.shape, weight.shape[1]
    along, across = OFF
    across = side(out, across)
    grid = (triton.cdiv(width, along), triton.cdiv(out, across), clients)
    sizes = (count, width, out, weight.stride(0), clients // len(rates))
    _subtract_product[grid](
        weight, gradients, rows, rates, *sizes, is_exact(), side(count), along, across, num_warps=4
    )


def self_test(device: torch.device) -> None:
    """Run each kernel once, so that a compiler error shows before a step needs it."""
    weight, rows = torch.zeros(1, 128, 128, device=device), torch.zeros(1, 2, 128, device=device)
    subtract_product(weight, multiply(rows, weight), rows, torch.zeros(1, device=device))
