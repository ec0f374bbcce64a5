"""Survival: Cox's likelihood and the C-index against their definitions, pair by pair."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec
from fedfrozen_app.tasks.survival_scores import harrell_c
from fedfrozen_app.tasks.target import target_of

ROWS = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(-4, 4)), min_size=1, max_size=9)


def as_tensors(rows):
    logits = torch.tensor([[score / 2] for *_, score in rows], dtype=torch.float64)
    labels = torch.tensor([[time, event] for time, event, _ in rows], dtype=torch.float64)
    return logits, labels


def by_definition(rows, ties):
    """−log of the partial likelihood: for each time, its events against those still at risk."""
    total = 0.0
    for time in {time for time, event, _ in rows if event}:
        died = [score / 2 for at, event, score in rows if event and at == time]
        at_risk = sum(math.exp(score / 2) for at, _, score in rows if at >= time)
        tied = sum(map(math.exp, died))
        for number, score in enumerate(died):
            share = number / len(died) if ties == "efron" else 0.0
            total += math.log(at_risk - share * tied) - score
    return total / len(rows)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_cox_is_the_partial_likelihood(rows, ties):
    found = target_of("survival", {"ties": ties}).batch_loss(*as_tensors(rows), None, None)
    assert float(found) == pytest.approx(by_definition(rows, ties), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_padding_counts_for_nothing_and_clients_are_apart(ties):
    """Whatever the padding's rows hold, also in the gradient, and for several clients under vmap."""
    rows = [(5, True, 1), (3, False, -2), (5, True, 3), (1, True, 0)]
    target = target_of("survival", {"ties": ties})
    logits, labels = as_tensors(rows)
    padded = [torch.cat([part, part[:2] * 3 + 1]) for part in (logits, labels)]
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)

    def loss(logits, labels, mask):
        return target.batch_loss(logits, labels, None, mask)

    expected = grad(lambda given: target.batch_loss(given, labels, None, None))(logits)
    both = [torch.stack([part, part.flip(0)]) for part in (*padded, mask)]
    gradients = vmap(grad(loss))(*both)
    torch.testing.assert_close(gradients[0][:4], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients[1].flip(0)[:4], expected, rtol=1e-12, atol=1e-14)
    assert not gradients[0][4:].any()
    assert float(loss(*padded, torch.zeros(6, dtype=torch.float64))) == 0.0


def test_scores_far_apart_overflow_nothing():
    labels = torch.tensor([[1.0, 1], [2, 1], [3, 1]])
    logits = torch.tensor([[500.0], [-500.0], [0.0]], requires_grad=True)
    for ties in ("breslow", "efron"):
        loss = target_of("survival", {"ties": ties}).batch_loss(logits, labels, None, None)
        (found,) = torch.autograd.grad(loss, logits)
        assert float(loss.detach()) == pytest.approx(500 / 3)
        assert torch.isfinite(found).all()


def test_a_batch_without_an_event_has_no_loss_and_no_gradient():
    labels = torch.tensor([[1.0, 0], [2, 0]])
    logits = torch.tensor([[0.5], [1.0]], requires_grad=True)
    loss = target_of("survival").batch_loss(logits, labels, None, None)
    assert float(loss.detach()) == 0.0
    assert not torch.autograd.grad(loss, logits)[0].any()


@settings(deadline=None, max_examples=80)
@given(rows=ROWS)
def test_harrells_c_counts_pairs(rows):
    right = pairs = 0
    for (time, event, risk), (later, other, lower) in itertools.permutations(rows, 2):
        if event and (time < later or (time == later and not other)):
            pairs += 1
            right += 1 if risk > lower else 0.5 if risk == lower else 0
    found = harrell_c(*(np.array(column) for column in zip(*rows, strict=True)))
    assert math.isnan(found) if not pairs else found == pytest.approx(right / pairs, abs=1e-12)


def test_no_pair_to_compare_leaves_the_metric_out():
    labels = torch.tensor([[1.0, 0], [2, 0]])
    assert target_of("survival").measure(torch.tensor([0.0, 1.0]), labels, ()) == {}


def test_discrete_time_counts_the_intervals_that_were_followed_up():
    """Edges 10, 20, 30. An event at 15: hazard of the second interval. Censored at 25: two intervals
    survived."""
    target = target_of("survival_discrete", {"edges": [10.0, 20.0, 30.0]})
    logits = torch.tensor([[0.2, -0.4, 0.9]]).repeat(5, 1)
    labels = torch.tensor([[15.0, 1], [25, 0], [30, 0], [31, 1], [0, 1]])
    lived = torch.nn.functional.softplus(logits[0])  # −log(1 − h)
    died = torch.nn.functional.softplus(-logits[0])  # −log h
    expected = [lived[0] + died[1], lived[:2].sum(), lived.sum(), lived.sum(), died[0]]
    torch.testing.assert_close(target.losses(logits, labels), torch.stack(expected))
    torch.testing.assert_close(target.losses(logits[:1], labels[:1]), torch.stack(expected[:1]))
    safe, unsafe = target.predictions(torch.tensor([[-3.0, -3, -3], [3, 3, 3]]))
    assert safe < unsafe  # a risk: the larger, the sooner


def test_discrete_time_s_mean_over_sites_is_that_of_all_rows():
    """What Cox's is not: a sum over rows."""
    target = target_of("survival_discrete", {"edges": [1.0, 2.0, 4.0]})
    logits = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(
        [[1.0, 1], [2, 0], [3, 1], [5, 1], [4, 0], [1, 1], [2, 1], [3, 0]], dtype=torch.float64
    )
    parts = [target.batch_loss(logits[rows], labels[rows], None, None) for rows in (slice(3), slice(3, 8))]
    whole = target.batch_loss(logits, labels, None, None)
    assert float(3 * parts[0] + 5 * parts[1]) / 8 == pytest.approx(float(whole), rel=1e-12)


def test_edges_hold_as_many_events_each():
    spec = DatasetSpec(event_column="e", intervals=4)
    found = target_of("survival_discrete").chosen([(float(time), 1) for time in range(1, 101)], spec)
    times = np.arange(1, 101)
    assert [int((times <= edge).sum()) for edge in found["edges"]] == [25, 50, 75, 100]


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        ((-3, 1), "The time in line 4 is -3, below 0"),
        ((3, 2), "2 in line 4 is neither 0 nor 1"),
        (("soon", 1), "'soon' in line 4 is no number, and column 't' needs one"),
        ((3, "maybe"), "'maybe' in line 4 is no number"),
    ],
)
def test_what_is_no_time_or_event_is_refused(cells, sentence):
    with pytest.raises(UserError, match=sentence):
        target_of("survival").read_label(cells, ("t", "e"), "line 4")


def test_a_missing_time_or_event_is_no_label():
    read = target_of("survival").read_label
    assert read(("", 1), ("t", "e"), "") is None and read((3, "NA"), ("t", "e"), "") is None
    assert read(("3", "true"), ("t", "e"), "") == (3.0, 1)


def test_no_event_at_all_is_refused():
    with pytest.raises(UserError, match="No train row has an event in column 'died'"):
        target_of("survival").chosen([(1.0, 0), (2.0, 0)], DatasetSpec(event_column="died"))
