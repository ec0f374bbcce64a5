"""Attention of each layer to a set of relevant tokens: formula (1) of SAFL, arXiv 2504.11793.

    A_l = Σ_h Σ_i Σ_j α^l_{h,i,j} · I(t_j ∈ T)        α: attention from token i to token j in head h

normalised to lie between 0 and 1: padding is left out, and each example's sum is divided by its heads times
its real queries, so that long and short texts have equal weight.

A set T of all tokens carries no information: every row of a softmax sums to 1, so every layer would score the
same.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import CONTINUED
from fedfrozen_app.models.task import Batch
from fedfrozen_app.vmap.attention import attention_by
from fedfrozen_app.vmap.model_modes import evaluation_mode

log = logging.getLogger(__name__)
TOKEN_SETS = ("cls", "entity", "no_sink")
CHUNK = 16  # examples at once: attention maps are large

Tokens = str | Sequence[int]


def check_tokens(tokens: Tokens, *, causal: bool) -> None:
    """Raise a `UserError` for token sets that cannot distinguish layers."""
    if not isinstance(tokens, str):
        if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
            raise UserError(
                f"strategy.tokens={tokens} is no list of token ids, such as [101,2003]: give one, or one of "
                f"{', '.join(TOKEN_SETS)}."
            )
        if not tokens:
            raise UserError("strategy.tokens is an empty list: name at least one token id, or cls.")
        return
    if tokens == "last":
        raise UserError(
            "strategy.tokens=last is meaningless: under a causal mask only the last query sees the last key. "
            "Use no_sink."
        )
    if tokens not in TOKEN_SETS:
        raise UserError(
            f"strategy.tokens={tokens} is unknown: choose one of {', '.join(TOKEN_SETS)}, or token ids. "
            "All tokens together would give every layer the same score."
        )
    if causal and tokens != "no_sink":
        raise UserError(
            f"strategy.tokens={tokens} needs an encoder: in a causal model the first token is an attention "
            "sink and later tokens see little of what follows. Use no_sink or token ids."
        )


def layer_scores(model: nn.Module, batch: Batch, tokens: Tokens) -> Tensor:
    """(examples, layers): each example's A_l, between 0 and 1, for the loaded model."""
    return head_scores(model, batch, tokens).mean(dim=2)


@torch.no_grad()
def head_scores(model: nn.Module, batch: Batch, tokens: Tokens, *, private: bool = False) -> Tensor:
    """(examples, layers, heads): the same before the mean over heads.

    Fused attention returns no weights, so this runs eager attention, in eval mode. With `private`, no error
    depends on the batch's content: the server sees whether a client succeeded.
    """
    found: list[Tensor] = []
    whole = True  # whether T has covered every real token so far
    with evaluation_mode(model), attention_by(model, "eager"):
        rows = len(next(iter(batch.inputs.values())))  # chunks of long texts are rows
        for start in range(0, rows, CHUNK):
            part = slice(start, start + CHUNK)
            inputs = {key: value[part] for key, value in batch.inputs.items()}
            maps = _attention_maps(model, inputs)  # layers of (examples, heads, queries, keys)
            size, _, count, _ = maps[0].shape
            real = inputs.get("attention_mask", maps[0].new_ones(size, count)).bool()  # (examples, tokens)
            chosen = relevant(tokens, inputs.get("input_ids"), batch.labels[part], real)
            whole = whole and bool((chosen == real).all())
            queries = real.to(maps[0].dtype)
            keys = chosen.to(maps[0].dtype)
            per_layer = [torch.einsum("ehqk,eq,ek->eh", layer, queries, keys) for layer in maps]
            found.append(torch.stack(per_layer, dim=1) / queries.sum(dim=1)[:, None, None])
    if whole:
        reason = (
            "The profiled tokens are all the tokens there are, which gives every layer the same score: "
            "name cls, entity, no_sink or fewer token ids."
        )
        if not private:
            raise UserError(reason)
        log.warning(reason)
    return torch.cat(found)


def relevant(tokens: Tokens, input_ids: Tensor | None, labels: Tensor, real: Tensor) -> Tensor:
    """The mask of the tokens in T, (examples, tokens) of bool."""
    first = torch.zeros_like(real)
    first[torch.arange(len(real)), real.int().argmax(dim=1)] = True
    if tokens == "cls":
        return first & real
    if tokens == "no_sink":
        return real & ~first
    if tokens == "entity":
        if labels.ndim != 2 or labels.shape != real.shape:
            raise UserError("The token set entity needs labelled tokens: use cls for whole texts.")
        return (_in_entity(labels) | first) & real
    if input_ids is None:
        raise UserError("Token ids were named, but these data are no texts: use cls.")
    assert not isinstance(tokens, str)
    wanted = torch.tensor(list(tokens), device=input_ids.device)
    return torch.isin(input_ids, wanted) & real


def _in_entity(labels: Tensor) -> Tensor:
    """Labels above 0 mark entities (0 is O); a word's later pieces follow its first."""
    inside = labels > 0
    for column in range(1, labels.shape[1]):
        inside[:, column] |= (labels[:, column] == CONTINUED) & inside[:, column - 1]
    return inside


def _attention_maps(model: nn.Module, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
    output: Any = model(**inputs, output_attentions=True)
    maps = getattr(output, "attentions", None)
    if not maps:
        raise UserError("This model gives no attention weights to profile: choose a Transformer.")
    return maps
