"""Attention of stacked clients: which mask it is given."""

import torch
from transformers import ViTConfig
from transformers.masking_utils import create_bidirectional_mask

from fedfrozen_app.models.attention import FOLDED, folded_mask


def test_no_mask_is_made_where_everybody_looks_at_everybody(monkeypatch):
    # As it is while a CUDA graph is recorded: some versions of transformers then make a mask of ones.
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    config = ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    config._attn_implementation = FOLDED
    tokens = torch.zeros(3, 5, 8)
    assert create_bidirectional_mask(config, tokens, None) is None
    padded = torch.tensor([[1, 1, 1, 0, 0]] * 3)
    seen = create_bidirectional_mask(config, tokens, padded)
    assert torch.equal(seen.expand(3, 1, 5, 5)[:, 0], padded.bool()[:, None].expand(3, 5, 5))


def test_whoever_may_not_look_at_all_is_given_a_mask():
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    causal = folded_mask(**sizes, allow_is_causal_skip=False)
    assert torch.equal(causal[0, 0], torch.ones(4, 4).tril().bool())
    near = folded_mask(**sizes, allow_is_causal_skip=False, allow_is_bidirectional_skip=True, local_size=2)
    assert near is not None
