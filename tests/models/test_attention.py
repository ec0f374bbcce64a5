"""Folded attention: the values and the slopes of every client on its own, wherever the slope is taken."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import scaled_dot_product_attention
from transformers import ViTConfig
from transformers.masking_utils import create_bidirectional_mask

from fedfrozen_app.models.attention import FOLDED, folded_attention, folded_mask

CLIENTS, BATCH, HEADS, TOKENS, WIDTH = 3, 2, 2, 5, 4


def drawn(*lead):
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, BATCH, HEADS, TOKENS, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def mask():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, 1, TOKENS, TOKENS)


def loss(shift, query, key, value, dropout=0.0):
    """Of one client; `shift` is a number of its own, as a mixing share is."""
    result, _ = folded_attention(
        nn.Identity(), query + shift, key * (1 + shift), value, mask(), dropout=dropout
    )
    return result.pow(2).sum()


def plain_slope(query, key, value):
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    result = scaled_dot_product_attention(query + shift, key * (1 + shift), value, mask())
    (slope,) = torch.autograd.grad(result.pow(2).sum(), shift)
    return slope


def test_a_slope_within_the_vmap_is_each_clients_own():
    parts = drawn(CLIENTS)
    found = vmap(grad(loss))(torch.zeros(CLIENTS, dtype=torch.float64), *parts)
    expected = torch.stack([plain_slope(*(part[client] for part in parts)) for client in range(CLIENTS)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_also_within_another_vmap_over_runs():
    runs = 2
    parts = drawn(runs, CLIENTS)
    found = vmap(vmap(grad(loss)))(torch.zeros(runs, CLIENTS, dtype=torch.float64), *parts)
    expected = [plain_slope(*(part[r, c] for part in parts)) for r in range(runs) for c in range(CLIENTS)]
    torch.testing.assert_close(found.flatten(), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_slope_around_the_vmap_is_the_same_one():
    parts = drawn(CLIENTS)
    shift = torch.zeros(CLIENTS, dtype=torch.float64, requires_grad=True)
    (around,) = torch.autograd.grad(vmap(loss)(shift, *parts).sum(), shift)
    within = vmap(grad(loss))(shift.detach(), *parts)
    torch.testing.assert_close(around, within, rtol=1e-12, atol=1e-12)


def test_a_slope_of_other_dropped_weights_is_refused():
    parts = drawn(CLIENTS)
    with pytest.raises(RuntimeError, match="while it drops weights"):
        vmap(lambda *given: grad(loss)(*given, dropout=0.5), randomness="different")(
            torch.zeros(CLIENTS, dtype=torch.float64), *parts
        )


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
