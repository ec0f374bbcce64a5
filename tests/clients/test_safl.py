"""Which layers a client of SAFL takes, and which token sets it refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clients.safl import AtRandom, ByAttention, ByGradient
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.choice import top_k
from fedfrozen_app.models.profile import check_tokens
from fedfrozen_app.models.task import Batch
from tests.conftest import worker_of


def test_top_k_takes_the_largest_and_ties_go_up():
    assert top_k(torch.tensor([0.1, 0.9, 0.5, 0.7]), 2) == (1, 3)
    assert top_k(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2) == (2, 3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.data())
def test_either_rule_gives_k_layers_in_order(values, data):
    count = len(values)
    k = data.draw(st.integers(1, count))
    kept = top_k(torch.tensor(values, dtype=torch.float64), k)
    for chosen in (kept, AtRandom(k).pick(count, torch.Generator().manual_seed(0))):
        assert list(chosen) == sorted(set(chosen)) and len(chosen) == k
        assert all(0 <= layer < count for layer in chosen)
    rest = [value for layer, value in enumerate(values) if layer not in kept]
    assert min(values[layer] for layer in kept) >= max(rest, default=-math.inf)


def test_a_tenth_of_the_rows_is_looked_at_and_no_fewer_than_eight():
    rule = ByAttention(1, examples=20)
    assert [rule.rows_to_score(count) for count in (5, 30, 100, 500)] == [5, 8, 10, 20]


def test_the_layers_that_the_loss_pulls_at_most():
    worker = worker_of("strategy=safl", "dataset=digits", "model=vit_tiny", "model.dtype=float64")
    rows = torch.arange(40)  # in three parts: the norm is that of their sum
    found = ByGradient(1).scores(worker, rows)
    worker.task.loss(worker.parameters, Batch(*worker.take(rows))).backward()
    squares = torch.zeros(found.shape[1], dtype=torch.float64)
    for name, value in worker.parameters.items():
        if (layer := worker.roles[name].layer) is not None:
            squares[layer] += value.grad.square().sum()
    assert torch.allclose(found.flatten(), squares / squares.sum(), rtol=1e-9)
    with pytest.raises(UserError, match="needs a score of each"):  # of one row of many nothing is known
        ByGradient(1).check(worker)


def test_token_sets_that_tell_no_layers_apart():
    for tokens, match in (("last", "meaningless"), ("all", "the same score"), ((), "empty")):
        with pytest.raises(UserError, match=match):
            check_tokens(tokens, causal=False)
    for tokens in ("cls", "entity"):
        with pytest.raises(UserError, match="Use no_sink"):
            check_tokens(tokens, causal=True)
