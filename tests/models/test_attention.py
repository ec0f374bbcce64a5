"""Folded attention: the values and the slopes of every client on its own, in one vmap or in two."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.functional import scaled_dot_product_attention

from fedfrozen_app.models.attention import folded_attention

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
def test_values_and_slopes_are_each_client_s_own(lead):
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, BATCH, HEADS, TOKENS, WIDTH)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    shift = torch.zeros(lead, dtype=torch.float64, requires_grad=True)
    mapped = loss
    for _ in lead:
        mapped = vmap(mapped)
    found = mapped(shift, *parts)
    (slopes,) = torch.autograd.grad(found.sum(), shift)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in lead)).reshape(-1, len(lead)):
        own = tuple(place.tolist())
        number = torch.zeros((), dtype=torch.float64, requires_grad=True)
        expected = alone(number, *(part[own] for part in parts))
        (slope,) = torch.autograd.grad(expected, number)
        torch.testing.assert_close(found[own], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slopes[own], slope, rtol=1e-12, atol=1e-12)
