"""Folded attention: which mask it is given, and each client's values and gradients, in one vmap or two."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.functional import scaled_dot_product_attention
from transformers import ViTConfig
from transformers.masking_utils import create_bidirectional_mask

from fedfrozen_app.vmap.attention import FOLDED, folded_attention, folded_mask

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 5, 4


def mask():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, 1, TOKENS, TOKENS)


def loss(shift, query, key, value):
    """Of one client; `shift` is a number of its own, as a mixing share is."""
    result, _ = folded_attention(nn.Identity(), query + shift, key * (1 + shift), value, mask())
    return result.pow(2).sum()


def alone(shift, query, key, value):
    return scaled_dot_product_attention(query + shift, key * (1 + shift), value, mask()).pow(2).sum()


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=["clients", "clients of runs"])
def test_values_and_gradients_are_each_client_s_own(lead):
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, BATCH, HEADS, TOKENS, WIDTH)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    shift = torch.zeros(lead, dtype=torch.float64, requires_grad=True)
    mapped = loss
    for _ in lead:
        mapped = vmap(mapped)
    found = mapped(shift, *parts)
    (gradients,) = torch.autograd.grad(found.sum(), shift)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in lead)).reshape(-1, len(lead)):
        own = tuple(place.tolist())
        number = torch.zeros((), dtype=torch.float64, requires_grad=True)
        expected = alone(number, *(part[own] for part in parts))
        (gradient,) = torch.autograd.grad(expected, number)
        torch.testing.assert_close(found[own], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients[own], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", [True, False], ids=["products", "sums"])
@pytest.mark.parametrize("tokens", [1, 5, 12, 30])
def test_few_tokens_are_attended_to_as_many_are(tokens, library, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: library)
    generator = torch.Generator().manual_seed(0)
    shape = (3, BATCH, HEADS, tokens, WIDTH)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    for part in parts:
        part.requires_grad_(True)
    found = vmap(lambda *own: folded_attention(nn.Identity(), *own, None)[0])(*parts)
    expected = scaled_dot_product_attention(*parts).transpose(-2, -3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients, wanted = (torch.autograd.grad(each.pow(3).sum(), parts) for each in (found, expected))
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-12)


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
