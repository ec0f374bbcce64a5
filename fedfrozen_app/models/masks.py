"""Padding masks for code that runs under `vmap`."""

import torch

from fedfrozen_app.models.task import Inputs


def with_ready_mask(inputs: Inputs, causal: bool) -> Inputs:
    """The padding mask as attention reads it, (batch, tokens) -> (batch, 1, tokens, tokens).

    transformers would look at the mask's values to see whether it can do without; under vmap it cannot look.
    """
    if "attention_mask" not in inputs:
        return inputs
    keys = inputs["attention_mask"].bool()[:, None, None, :]
    tokens = keys.shape[-1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device)
    return inputs | {"attention_mask": keys & (seen.tril() if causal else seen)}
