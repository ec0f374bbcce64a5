"""The attention mask in full, for code that runs under `vmap`."""

from typing import Any

import torch
from torch import nn

from fedfrozen_app.models.architectures import architecture_of
from fedfrozen_app.models.task import Inputs


def with_attention_mask(inputs: Inputs, model: nn.Module) -> Inputs:
    """The padding mask expanded for attention, (batch, tokens) -> (batch, 1, tokens, tokens).

    transformers reads the mask's values to decide whether it can be skipped, which is impossible under vmap.
    If layers have different attention windows, there is one mask per kind of layer.
    """
    config: Any = getattr(model, "config", None)
    known = architecture_of(model)
    if "attention_mask" not in inputs or (known is not None and known.own_mask):
        return inputs
    keys = inputs["attention_mask"].bool()[:, None, None, :]
    place = torch.arange(keys.shape[-1], device=keys.device)
    back = place[:, None] - place[None, :]  # (queries, keys): distance from query back to key
    causal = known is not None and known.causal
    seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    window = getattr(config, "sliding_window", None)
    if window is None:
        return inputs | {"attention_mask": keys & seen}
    near = seen & (back < window if causal else back.abs() <= window)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:  # the same for all layers
        return inputs | {"attention_mask": keys & near}
    ways = {"full_attention": keys & seen, "sliding_attention": keys & near}
    by_kind: Any = {kind: ways[kind] for kind in kinds}
    return inputs | {"attention_mask": by_kind}
