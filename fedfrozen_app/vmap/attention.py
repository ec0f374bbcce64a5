"""Attention for code that runs under `vmap`: fused attention has no rule there, so clients are folded into
the batch.

Attention treats every sequence alike, so the batches of several clients are one larger batch: the client axis
moves into the batch axis.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from fedfrozen_app.vmap.devices import has_gpu_kernels
from fedfrozen_app.vmap.vmap_escape import stacked

# Whether folded attention may use a GPU kernel of this package: not under a compiler, which cannot trace it,
# nor before the kernel is compiled.
_kernels: ContextVar[bool] = ContextVar("kernels", default=False)
FOLDED, PLAIN = "fedfrozen_folded", "fedfrozen_plain"
SHORT = 16  # tokens: for at most this many a CPU's fused attention is twice as slow as three products
TINY = 8  # tokens: without MKL's batched small products, sums take a fourth of the time


def _by_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2)).softmax(dim=-1) @ value


def _by_sums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query.unsqueeze(-2) * key.unsqueeze(-3)).sum(dim=-1).softmax(dim=-1)
    return (weights.unsqueeze(-1) * value.unsqueeze(-3)).sum(dim=-2)


def _attend(
    scale: float, dropout: float, lead: int, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor
) -> Tensor:
    """Attention of (*lead, batch, heads, tokens, width), with the leading axes folded into the batch."""
    folded = [part.flatten(0, lead) for part in (query, key, value, *mask)]
    return _of_one_batch(scale, dropout, *folded).unflatten(0, query.shape[: lead + 1])


def _of_one_batch(
    scale: float, dropout: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    short = query.device.type == "cpu" and query.shape[-2] <= SHORT and query.dtype != torch.bfloat16
    if short and mask is None and not dropout:
        in_sums = query.shape[-2] <= TINY and not torch.backends.mkl.is_available()
        return (_by_sums if in_sums else _by_products)(query * scale, key, value)
    if _kernels.get():
        from fedfrozen_app.vmap.attention_kernels import Attended, serves  # Triton needs a GPU

        if serves(query, key, mask, dropout):
            found: Tensor = Attended.apply(query, key, value, mask, scale, dropout)
            return found
    return scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)


def folded_attention(
    module: nn.Module,
    query: Tensor,  # (batch, heads, tokens, width)
    key: Tensor,  # (batch, key heads, tokens, width)
    value: Tensor,
    attention_mask: Tensor | None,  # (batch, 1, tokens, tokens), true where a token may attend
    scaling: float | None = None,
    dropout: float = 0.0,
    **ignored: Any,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # grouped-query attention: each key serves several heads
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = () if attention_mask is None else (attention_mask,)
    attend = partial(_attend, scale, dropout if module.training else 0.0)
    result = stacked(attend, query, key, value, *mask)
    # (batch, heads, tokens, width) -> (batch, tokens, heads, width)
    return result.transpose(1, 2), None


def folded_mask(
    *sizes: int,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """The attention mask; None if every token attends to every other. A causal mask is never left out: for
    folded attention no mask means full attention.

    transformers builds a mask of ones during CUDA graph capture, which prevents fused attention.
    """
    if attention_mask is None and allow_is_bidirectional_skip and local_size is None:
        return None
    mask: Tensor | None = sdpa_mask(
        *sizes,
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        allow_is_causal_skip=False,
        local_size=local_size,
        **others,
    )
    return mask


def plain_attention(
    module: nn.Module,
    query: Tensor,  # (batch, heads, tokens, width)
    key: Tensor,  # (batch, key heads, tokens, width)
    value: Tensor,
    attention_mask: Tensor | None,  # added to the scores
    scaling: float | None = None,
    dropout: float = 0.0,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention as in transformers, but with a float64 softmax for float64 models."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    exact = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=exact).to(query.dtype)
    if attention_mask is not None:  # a token that may attend to nothing gets zeros, as in torch
        weights = weights * (attention_mask > torch.finfo(attention_mask.dtype).min).any(dim=-1, keepdim=True)
    weights = drop(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(FOLDED, folded_attention)
AttentionMaskInterface.register(FOLDED, folded_mask)
AttentionInterface.register(PLAIN, plain_attention)
AttentionMaskInterface.register(PLAIN, eager_mask)


@contextmanager
def attention_by(model: nn.Module, implementation: str) -> Iterator[None]:
    """Within the block the model uses this attention implementation."""
    config: Any = getattr(model, "config", None)
    usual = getattr(config, "_attn_implementation", None)
    if usual is None:  # no Transformer
        yield
        return
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = usual


@contextmanager
def with_gpu_kernels(device: torch.device) -> Iterator[None]:
    """Within the block folded attention uses a GPU kernel of this package, if there is one."""
    before = _kernels.set(has_gpu_kernels(device))
    try:
        yield
    finally:
        _kernels.reset(before)


def folded(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block the model's attention folds the clients of a vmap into the batch."""
    return attention_by(model, FOLDED)
