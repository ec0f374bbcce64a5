"""Folded attention: the values and the slopes of every client on its own, wherever the slope is taken."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import scaled_dot_product_attention

from fedfrozen_app.models.attention import folded_attention

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
