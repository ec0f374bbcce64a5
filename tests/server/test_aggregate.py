"""The weighted mean and the drift, against arithmetic a reader can redo."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.server.aggregate import RunningMean, Update
from fedfrozen_app.server.optimizer import NoOptimizer


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def finish(mean, model):
    """The new values, by the server's plain step, and the drift."""
    update = mean.finish()
    return NoOptimizer().step(model, update.model), update.drift


def test_two_clients_by_hand():
    model = {"w": tensor(1.0, 1.0)}
    mean = RunningMean(model, lambda name: "rest")
    assert mean.add({"w": tensor(2.0, 1.0)}, 1) is None  # u1 = (1, 0)
    assert mean.add({"w": tensor(1.0, 3.0)}, 3) is None  # u2 = (0, 2)
    merged, drift = finish(mean, model)
    # 1/4 (1, 0) + 3/4 (0, 2) = (0.25, 1.5)
    assert merged["w"].tolist() == [1.25, 2.5]
    # Σ wᵢ‖uᵢ‖² = 1/4·1 + 3/4·4 = 3.25;  ‖ū‖² = 0.0625 + 2.25 = 2.3125
    assert drift["rest"]["mean_update"] == pytest.approx(math.sqrt(2.3125))
    assert drift["rest"]["rms"] == pytest.approx(math.sqrt(3.25 - 2.3125))


def test_a_name_is_averaged_over_those_who_sent_it():
    model = {"a": tensor(0.0), "b": tensor(0.0), "c": tensor(7.0)}
    mean = RunningMean(model, lambda name: None)
    mean.add({"a": tensor(2.0), "b": tensor(4.0)}, 1)
    mean.add({"a": tensor(6.0)}, 3)
    merged, drift = finish(mean, model)
    assert merged["a"].item() == 5.0  # (1·2 + 3·6) / 4
    assert merged["b"].item() == 4.0  # only the first client sent it
    assert "c" not in merged  # nobody did: it keeps its value
    assert drift == {}


def test_groups_are_apart_and_what_is_not_sent_is_absent():
    model = {"q": tensor(0.0), "v": tensor(0.0)}
    mean = RunningMean(model, lambda name: {"q": "kernel", "v": "rest"}[name])
    mean.add({"v": tensor(3.0)}, 1)
    _, drift = finish(mean, model)
    assert drift == {"rest": {"rms": 0.0, "mean_update": 3.0}}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reply_that_is_not_finite_leaves_no_trace(bad):
    model = {"a": tensor(1.0, 2.0), "b": tensor(0.0)}
    mean = RunningMean(model, lambda name: "rest")
    mean.add({"a": tensor(2.0, 2.0), "b": tensor(1.0)}, 1)
    reason = mean.add({"a": tensor(5.0, 5.0), "b": tensor(bad)}, 1)
    assert reason is not None and "not finite in b" in reason
    merged, _ = finish(mean, model)
    assert merged["a"].tolist() == [2.0, 2.0] and merged["b"].tolist() == [1.0]


def test_nothing_added_changes_nothing():
    assert RunningMean({"a": tensor(1.0)}, lambda name: "rest").finish() == Update()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_any_replies_give_the_weighted_mean_and_a_real_drift(replies):
    model = {"w": tensor(0.5, -2.0, 10.0)}
    mean = RunningMean(model, lambda name: "rest")
    total = sum(weight for weight, _ in replies)
    expected = sum(weight * tensor(*values) for weight, values in replies) / total
    for weight, values in replies:
        assert mean.add({"w": tensor(*values)}, weight) is None
    merged, drift = finish(mean, model)
    torch.testing.assert_close(merged["w"], expected, rtol=1e-9, atol=1e-9)
    spread = sum(w * (tensor(*v) - expected).square().sum().item() for w, v in replies) / total
    assert drift["rest"]["rms"] ** 2 == pytest.approx(spread, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("unsound", [None, 1])
@pytest.mark.parametrize("equal", [(), ("",)])
@pytest.mark.parametrize("zero_fill", [False, True])
def test_what_is_predicted_is_the_result(unsound, equal, zero_fill):
    """To the bit, and only where all are taken as they were expected."""
    base = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    layout = Layout.of(base)
    rows = torch.randn(3, layout.width, generator=torch.Generator().manual_seed(1))
    if unsound is not None:
        rows[unsound, 0] = torch.nan
    updates = []
    for predicts in (False, True):
        mean = RunningMean(base, lambda name: name, zero_fill=zero_fill, equal=equal)
        block = Block(("0", "1", "2"), layout, layout.flatten(base), rows.clone(), [5, 3, 8])
        mean.expect(block.slice(0))
        assert mean.predict(4) is None  # somebody else is still to come
        likely = mean.predict(3) if predicts else None
        refused = [mean.add(block.slice(number), count) for number, count in enumerate(block.examples)]
        assert [reason is not None for reason in refused] == [number == unsound for number in range(3)]
        updates.append(mean.finish())
        assert (updates[-1] is likely) == (predicts and unsound is None)
    one, other = updates
    assert one.replies == other.replies and one.drift == other.drift
    assert all(torch.equal(one.model[name], other.model[name]) for name in base)
    assert all(torch.isfinite(value).all() for value in one.model.values())


def test_a_parameter_that_is_a_single_number_is_averaged_in_a_block_too():
    base = {"w": tensor(1.0, 2.0), "scale": torch.tensor(3.0, dtype=torch.float64)}
    layout = Layout.of(base)
    rows = torch.stack([layout.flatten({n: v + step for n, v in base.items()}) for step in (1.0, 5.0)])
    block = Block(("0", "1"), layout, layout.flatten(base), rows, [3, 1])
    mean = RunningMean(base, lambda name: name)
    assert [mean.add(block.slice(number), count) for number, count in enumerate((3.0, 1.0))] == [None, None]
    update = mean.finish()
    assert update.model["scale"] == 2.0 and update.drift["scale"]["mean_update"] == 2.0
