"""GPU kernels, in Triton, for attention over short sequences in float32.

torch's own float32 kernel takes several times as long as reading the inputs and writing the outputs. Here a
program holds all keys of a head, so that softmax is one pass over a row; scores are never written, and
dropout is redrawn in the backward pass.
"""

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.core.seeds import seeded
from fedfrozen_app.vmap.devices import is_exact
from fedfrozen_app.vmap.row_kernels import side

log = logging.getLogger(__name__)
LONGEST, WIDEST = 128, 64  # tokens, and numbers of a head
HIGH = 64  # queries of one tile, in the forward pass
HIDDEN = -1e30  # the score of a masked key; padding has a lower one


@triton.jit
def _weights(
    query, key, mask, row, column, tokens, mask_row, mask_column,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """The scores of these queries; masked keys and padding get very low ones."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    there = (row < tokens)[:, None] & (column < tokens)[None, :]
    if MASKED:
        at = mask + row[:, None] * mask_row + column[None, :] * mask_column
        scores = tl.where(tl.load(at, mask=there, other=0) != 0, scores, HIDDEN)
    return tl.where((column < tokens)[None, :], scores, 2 * HIDDEN)


@triton.jit
def _kept(seed, pair, row, tokens, dropout, LONG: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, LONG) the weights that dropout keeps, the same on every call. Draws four numbers at a time."""
    fourth = tl.arange(0, LONG // 4)
    offset = (pair * tokens + row)[:, None] * (LONG // 4) + fourth[None, :]
    one, two, three, four = tl.rand4x(tl.load(seed), offset)
    drawn = tl.join(tl.join(one, two), tl.join(three, four))
    return tl.reshape(drawn, (row.shape[0], LONG)) >= dropout


@triton.jit
def _attend(
    query, key, value, mask, seed, out, logs, heads, tokens, width, scale, dropout,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, m_n, m_q, m_k,
    MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr,
    HIGH: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row, column, part = tl.program_id(1) * HIGH + tl.arange(0, HIGH), tl.arange(0, LONG), tl.arange(0, WIDE)
    rows = (row < tokens)[:, None] & (part < width)[None, :]
    columns = (column < tokens)[:, None] & (part < width)[None, :]
    asks = tl.load(query + n * q_n + h * q_h + row[:, None] * q_t + part[None, :], mask=rows, other=0.0)
    keys = tl.load(key + n * k_n + h * k_h + column[:, None] * k_t + part[None, :], mask=columns, other=0.0)
    values = tl.load(
        value + n * v_n + h * v_h + column[:, None] * v_t + part[None, :], mask=columns, other=0.0
    )
    scores = _weights(
        asks * scale, keys, mask + n * m_n, row, column, tokens, m_q, m_k, MASKED, PRECISION, HIDDEN
    )
    most = tl.max(scores, axis=1)
    weights = tl.where(scores <= HIDDEN, 0.0, tl.exp(scores - most[:, None]))  # NaN stays NaN
    total = tl.sum(weights, axis=1)
    total = tl.where(total == 0.0, 1.0, total)  # a token that may attend to nothing gets zeros
    weights = weights / total[:, None]
    if DROPS:
        weights = tl.where(_kept(seed, pair, row, tokens, dropout, LONG), weights / (1 - dropout), 0.0)
    found = tl.dot(weights, values, input_precision=PRECISION)
    flat = ((n * tokens + row) * heads + h)[:, None] * width + part[None, :]
    tl.store(out + flat, found, mask=rows)
    tl.store(logs + pair.to(tl.int64) * tokens + row, most + tl.log(total), mask=row < tokens)


@triton.jit
def _attend_back(
    query, key, value, mask, seed, out, logs, gradients, by_query, by_key, by_value,
    heads, tokens, width, scale, dropout,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, m_n, m_q, m_k, s_n, s_h, s_t,
    MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr,
    LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row, part = tl.arange(0, LONG), tl.arange(0, WIDE)
    there = (row < tokens)[:, None] & (part < width)[None, :]
    asks = tl.load(query + n * q_n + h * q_h + row[:, None] * q_t + part[None, :], mask=there, other=0.0)
    keys = tl.load(key + n * k_n + h * k_h + row[:, None] * k_t + part[None, :], mask=there, other=0.0)
    values = tl.load(value + n * v_n + h * v_h + row[:, None] * v_t + part[None, :], mask=there, other=0.0)
    gradient = tl.load(
        gradients + n * s_n + h * s_h + row[:, None] * s_t + part[None, :], mask=there, other=0.0
    )
    flat = ((n * tokens + row) * heads + h)[:, None] * width + part[None, :]
    given = tl.load(out + flat, mask=there, other=0.0)
    level = tl.sum(given * gradient, axis=1)
    asks = asks * scale
    scores = _weights(asks, keys, mask + n * m_n, row, row, tokens, m_q, m_k, MASKED, PRECISION, HIDDEN)
    norm = tl.load(logs + pair.to(tl.int64) * tokens + row, mask=row < tokens, other=0.0)
    shut = (row >= tokens)[:, None] | (scores <= HIDDEN)
    weights = tl.where(shut, 0.0, tl.exp(scores - norm[:, None]))
    by_weights = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
    if DROPS:
        kept = _kept(seed, pair, row, tokens, dropout, LONG)
        by_weights = tl.where(kept, by_weights / (1 - dropout), 0.0)
        used = tl.where(kept, weights / (1 - dropout), 0.0)
    else:
        used = weights
    tl.store(by_value + flat, tl.dot(tl.trans(used), gradient, input_precision=PRECISION), mask=there)
    by_scores = weights * (by_weights - level[:, None])
    tl.store(by_query + flat, tl.dot(by_scores, keys, input_precision=PRECISION) * scale, mask=there)
    tl.store(by_key + flat, tl.dot(tl.trans(by_scores), asks, input_precision=PRECISION), mask=there)


class Attended(torch.autograd.Function):
    """softmax(scale · query · keyᵀ) · value, of (batch, heads, tokens, width) each, stored as (batch, tokens,
    heads, width). `mask`, (batch, 1, tokens, tokens), is true where a token may attend."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        query, key, value = (_last_together(each) for each in (query, key, value))
        batch, heads, tokens, width = query.shape
        out = query.new_empty(batch, tokens, heads, width).transpose(1, 2)
        logs = query.new_empty(batch, heads, tokens)
        # As many bits as the seed of torch's GPU generator.
        seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout else logs
        marks, steps = _marks(mask, query)
        long, wide = _sides(tokens, width)
        high = min(long, HIGH)
        sizes = (heads, tokens, width, scale, dropout)
        strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *steps)
        how = (mask is not None, dropout > 0, _precision(), HIDDEN)
        grid = (batch * heads, triton.cdiv(tokens, high))
        _attend[grid](query, key, value, marks, seed, out, logs, *sizes, *strides, *how, high, long, wide)
        ctx.save_for_backward(query, key, value, marks, seed, out, logs)
        ctx.given = (sizes, strides, how, long, wide)
        return out

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, marks, seed, out, logs = ctx.saved_tensors
        sizes, strides, how, long, wide = ctx.given
        gradients = _last_together(gradients)
        found = [torch.empty_like(out) for _ in range(3)]
        given = (query, key, value, marks, seed, out, logs, gradients, *found)
        steps = (*strides, *gradients.stride()[:3])
        pairs = out.shape[0] * out.shape[1]
        _attend_back[(pairs,)](*given, *sizes, *steps, *how, long, wide, num_warps=8)
        return (*found, None, None, None)


def serves(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether a program on this GPU can hold arrays of these sizes."""
    tokens, width = query.shape[-2:]
    usual = query.shape == key.shape and query.dtype == torch.float32
    seen = mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)
    if not usual or not seen or tokens > LONGEST or width > WIDEST:
        return False
    return _works(query.device, tokens, width, mask is not None, dropout > 0, _precision())


@cache
def _works(device: torch.device, tokens: int, width: int, masked: bool, drops: bool, precision: str) -> bool:
    """Compile and try the kernel once, forward and backward: GPUs differ in how much a program can hold."""
    like = torch.zeros(1, tokens, 1, width, device=device).transpose(1, 2).requires_grad_()
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device) if masked else None
    try:
        with torch.enable_grad(), seeded(0, device):  # these draws do not shift later ones
            found = Attended.apply(like, like, like, mask, 1.0, 0.5 if drops else 0.0)
            torch.autograd.grad(found.sum(), like)
    except Exception as error:  # noqa: BLE001  (a compiler can fail in any way, and training works without)
        log.info("Attention runs without its own GPU kernel: %s", format_error(error))
        return False
    return True


def _marks(mask: Tensor | None, like: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """The mask as numbers, and the strides of its batch, queries and keys."""
    if mask is None:
        return like, (0, 0, 0)
    whole = mask.view(torch.uint8).expand(len(like), 1, like.shape[-2], like.shape[-2])
    return whole, (whole.stride(0), whole.stride(2), whole.stride(3))


def _sides(tokens: int, width: int) -> tuple[int, int]:
    return side(tokens), side(width)


def _last_together(each: Tensor) -> Tensor:
    return each if each.stride(-1) == 1 else each.contiguous()


def _precision() -> str:
    return "tf32x3" if is_exact() else "tf32"
