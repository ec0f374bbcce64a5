"""The plan's rules, and the order's way through JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfrozen_app.exchange.ledger import Ledger
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request

NAMES = st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=8)


def test_freezing_takes_a_name_out_of_training_and_off_the_wire():
    plan = Plan.full(["a", "b", "c"]).freeze(["b"])
    assert plan.trained == ("a", "c") and plan.shared == ("a", "c")


def test_private_names_are_trained_but_do_not_travel():
    plan = Plan.full(["a", "b"]).keep_private(["b"])
    assert plan.trained == ("a", "b") and plan.shared == ("a",) and plan.private == ("b",)


def test_a_plan_that_would_leak_cannot_be_made():
    with pytest.raises(ValueError, match="private"):
        Plan(trained=("a",), shared=("a",), private=("a",))
    with pytest.raises(ValueError, match="not trained"):
        Plan(trained=(), shared=("a",))


@given(NAMES, st.data())
def test_an_order_survives_its_json(names, data):
    frozen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    plan = Plan.full(names).freeze(frozen)
    request = TrainRequest(3, plan, dict.fromkeys(names, "0" * 64), "fedprox", {"mu": 0.1})
    back = read_train_request(request.json)
    assert back == request and back.digest == request.digest
    assert not set(plan.shared) & set(frozen)


def test_orders_that_differ_have_other_digests():
    plan = Plan.full(["a"])
    requests = [
        TrainRequest(1, plan, {"a": "x"}),
        TrainRequest(2, plan, {"a": "x"}),
        TrainRequest(1, plan, {"a": "y"}),
        TrainRequest(1, plan.freeze("a"), {"a": "x"}),
        TrainRequest(1, plan, {"a": "x"}, "fedprox", {"mu": 0.1}),
    ]
    assert len({request.digest for request in requests}) == len(requests)


def test_the_ledger_sends_what_is_missing_and_remembers_one_base():
    ledger = Ledger()
    assert ledger.missing("0", {"a": "1", "b": "2"}) == ["a", "b"]
    ledger.confirm("0", ["1", "2"])
    assert ledger.missing("0", {"a": "1", "b": "3"}) == ["b"]
    assert ledger.missing("1", {"a": "1"}) == ["a"]  # every client has its own record
    ledger.confirm("0", ["1", "3"])
    assert ledger.missing("0", {"b": "2"}) == ["b"]
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.missing("0", {"a": "1", "b": "3"}) == []


def test_the_ledger_knows_what_a_client_would_lack_without_earlier_runs():
    ledger, base = Ledger(), {"a": "1", "b": "2"}
    assert ledger.is_cold("0")
    ledger.find("0", ["1"])  # it says so in its hello
    assert not ledger.is_cold("0")
    assert ledger.missing("0", base) == ["b"] and ledger.missing_cold("0", base) == ["a", "b"]
    assert ledger.state_dict() == {"0": []}  # a run that is resumed is told of it again
    ledger.confirm("0", ["1", "2"])
    assert ledger.is_cold("0") and ledger.missing_cold("0", {"a": "1", "b": "3"}) == ["b"]
    ledger.find("0", ["0", "2"])  # it has lost one, and kept another of an earlier run
    assert ledger.missing("0", base) == ["a"] == ledger.missing_cold("0", base)
    assert ledger.missing_cold("0", {"c": "0"}) == ["c"] and ledger.missing("0", {"c": "0"}) == []
