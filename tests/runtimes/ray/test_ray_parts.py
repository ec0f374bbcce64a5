"""A run whose clients train in parts is the run of one process. The workers are this process's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfrozen_app.runtimes.ray.packing import Packed, packed_state, restore_state
from fedfrozen_app.runtimes.ray.part import deal
from tests.conftest import same_bits, slowly

EXACT = ("model.dtype=float64", "num_rounds=3", "checkpoint.keep=9")
UNEQUAL = ("num_clients=5", "partition.alpha=0.3", "partition.min_size=4")
SGD = ("client=sgd", "client.weight_decay=0")
CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=2")
TOGETHER = "runtime.runner=cohort"


def same_run(one, parts, rounds=(1, 2, 3)):
    for server_round in rounds:
        before, after = one.model_after(server_round), parts.model_after(server_round)
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)
    for row, twin in zip(one.rows, parts.rows, strict=True):
        for key in ("clients", "clients_ok", "bytes_up", "bytes_down", "bytes_up_by_role", "trained_params"):
            assert row.get(key) == twin.get(key), key
        for key in ("train_loss", "test_loss", "epsilon_max"):
            assert row.get(key, 0) == pytest.approx(twin.get(key, 0), rel=1e-9), key
        for group, values in (row.get("drift") or {}).items():
            assert twin["drift"][group] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fedfrozen", "runtime.max_block=2", TOGETHER),  # several blocks a part, and the freeze
        ("strategy=scaffold", *SGD),  # arrays come with the request, clients keep others, weights are equal
        ("strategy=safl", "strategy.select=gradient", "strategy.top_k=1"),  # names differ by client
        *slowly(
            ("strategy=fedavg",),
            ("strategy=fedavg", TOGETHER),
            ("strategy=scaffold", *SGD, TOGETHER),
            ("strategy=fedper",),
            ("strategy=fedper", TOGETHER),  # clients keep parts of the model
            ("strategy=fedavg", "participation=0.4", "runtime.max_block=1", TOGETHER),  # fewer than parts
            ("strategy=fedavg", "aggregation=median"),  # every reply must come by itself
            ("strategy=fedavg", "aggregation.far_out=2"),
            ("strategy=qfedavg",),
            ("strategy=fedavg", "adapter=lora"),
            ("strategy=fedavg", "adapter=lora", "adapter.rule=stack"),
            ("strategy=fedavg", "codec=int8"),
            ("strategy=feddyn", *SGD),
            ("strategy=apfl",),
            (
                "strategy=fedavg",
                "clock=profiles",
                "pacing=buffered",
                "pacing.buffer=2",
                "pacing.concurrency=4",
            ),
            ("strategy=fedavg", *CLOCK, "pacing=deadline", "pacing.share=0.6"),
        ),
    ],
    ids=" ".join,
)
def test_a_run_in_parts_is_the_run_of_one_process(train, in_parts, words):
    words = (*EXACT, *UNEQUAL, *words)
    same_run(train(*words, folder="one"), in_parts(*words, workers=3))


def test_parts_that_end_in_another_order_or_elsewhere_give_the_same_bits(in_parts):
    words = (*UNEQUAL, "strategy=scaffold", *SGD, "num_rounds=2")
    first = in_parts(*words, workers=3)
    backwards = in_parts(*words, workers=3, folder="backwards", order=-1)
    lost = in_parts(*words, workers=3, folder="lost", lost=1)
    assert same_bits(first.model, backwards.model)
    assert same_bits(first.model, lost.model)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["cohort", *slowly("sequential")])
def test_a_run_in_parts_resumes_to_the_bit(in_parts, runner):
    words = (*UNEQUAL, "strategy=fedper", "client.lr_schedule=constant", f"runtime.runner={runner}")
    whole = in_parts(*words, "num_rounds=3", folder="whole")
    in_parts(*words, "num_rounds=2", folder="half")
    assert same_bits(whole.model, in_parts(*words, "num_rounds=3", folder="half", resume=True).model)


def test_one_sum_comes_back_in_place_of_the_replies(in_parts):
    pools = []
    run = in_parts(*UNEQUAL, "strategy=fedavg", "num_rounds=1", "eval_every=1", workers=2, pools=pools)
    (pool,) = pools
    assert len(pool.replies) == 2
    for reply in pool.replies:
        assert reply.sums is not None and all(one.arrays is None for one in reply.replies)
        assert set(reply.sums.weights) == set(run.model)
        assert reply.sums.examples == sum(one.reply.examples for one in reply.replies)


def test_frozen_parameters_are_sent_to_a_worker_once(in_parts):
    pools = []
    run = in_parts("strategy=fedfrozen", "strategy.warmup_rounds=1", "num_rounds=3", pools=pools)
    # Not the first round: arrays of equal content, such as biases of zero, are sent once.
    second, third = (pools[0].sizes[number : number + 2] for number in (2, 4))
    by_role = run.rows[2]["bytes_down_by_role"]
    frozen = (by_role["query"] + by_role["key"]) // 3  # clients
    assert frozen > 0 and [one - other for one, other in zip(second, third, strict=True)] == [frozen] * 2


def test_a_client_that_diverges_is_set_aside_where_it_trains(train, in_parts, monkeypatch):
    """Its update never enters the part's sum: one NaN would be all of it."""
    from fedfrozen_app.handlers import train_handler

    real = train_handler.train_openly

    def diverges(worker, client, *rest):
        result, scores = real(worker, client, *rest)
        if client == "1":
            next(iter(result.trained.values())).fill_(float("nan"))
        return result, scores

    monkeypatch.setattr(train_handler, "train_openly", diverges)
    words = (*EXACT, "strategy=fedavg", "num_rounds=1")
    one, parts = train(*words, folder="one"), in_parts(*words)
    assert one.rows[1]["failures"] == parts.rows[1]["failures"]
    assert (
        "Client 1 was set aside" in parts.rows[1]["failures"][0]
        and "not finite" in parts.rows[1]["failures"][0]
    )
    same_run(one, parts, rounds=(1,))


def test_a_client_that_fails_leaves_the_others_of_its_part(in_parts, monkeypatch):
    from fedfrozen_app.handlers import train_handler

    real = train_handler.train_openly

    def train(worker, client, *rest):
        if client == "2":
            raise ArithmeticError("no such luck")
        return real(worker, client, *rest)

    monkeypatch.setattr(train_handler, "train_openly", train)
    run = in_parts("strategy=fedavg", "num_rounds=1")
    assert run.rows[1]["clients_ok"] == 2
    assert run.rows[1]["failures"] == ["Client 2 was set aside: it failed: ArithmeticError: no such luck."]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["cohort", *slowly("sequential")])
def test_private_clients_spend_and_train_as_in_one_process(train, in_parts, runner):
    words = (
        *("strategy=fedavg", "privacy=dp_sgd", "privacy.epsilon=8", "privacy.accountant=rdp"),
        *("privacy.seeded_noise=true", "client.local_steps=2", "client.batch_size=4", "num_rounds=2"),
        *("model.dtype=float64", "checkpoint.keep=9", f"runtime.runner={runner}"),
    )
    one, parts = train(*words, folder="one"), in_parts(*words)
    same_run(one, parts, rounds=(1, 2))
    assert [row.get("epsilon") for row in one.rows] == [row.get("epsilon") for row in parts.rows]


@pytest.mark.slow
def test_masked_rounds_sum_as_in_one_process(train, in_parts):
    words = ("strategy=fedavg", "secure_aggregation=on", "num_rounds=2", "checkpoint.keep=9")
    one, parts = train(*words, folder="one"), in_parts(*words)
    assert all(row["secure"]["summed"] == 3 for row in parts.rows[1:])
    for name, value in one.model.items():  # the same rounding, by seeds of the clients
        torch.testing.assert_close(parts.model[name], value, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_work_is_dealt_evenly_and_once(counts, parts):
    places = deal(counts, parts)
    assert sorted(place for own in places for place in own) == list(range(len(counts)))
    loads = [sum(counts[place] for place in own) for own in places]
    assert max(loads) <= sum(counts) / parts + max(counts)
    assert max(loads) - min(loads) <= max(counts)


def test_what_is_packed_comes_out_with_its_types_and_bits():
    arrays = {
        "a": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "b/x": torch.tensor(True),
        "c": torch.randn(5).bfloat16(),
        "d": torch.empty(0, 3),
        "e": torch.arange(4).reshape(2, 2).t(),
    }
    packed = Packed.of(arrays)
    packed.data.flags.writeable = False  # as Ray hands it over
    found = packed.unpack()
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    found["a"].add_(1)
    assert torch.equal(packed.unpack()["a"], arrays["a"])


def test_what_a_client_keeps_goes_there_and_back():
    from flwr.app import ConfigRecord, RecordDict

    from fedfrozen_app.exchange.arrays import to_record, to_tensors

    state = RecordDict(
        {"card": ConfigRecord({"json": "{}"}), "privacy": ConfigRecord({"rounds": 3, "key": b"\0\1"})}
    )
    state["private"] = to_record({"w": torch.ones(2)}, local=True)
    packed = packed_state(state)
    assert set(packed) == {"private", "privacy"}
    other = RecordDict({"card": ConfigRecord({"json": "[]"}), "old": ConfigRecord({"a": 1})})
    restore_state(other, packed)
    assert set(other) == {"card", "private", "privacy"} and other["card"]["json"] == "[]"
    assert dict(other["privacy"]) == {"rounds": 3, "key": b"\0\1"}
    assert torch.equal(to_tensors(other["private"])["w"], torch.ones(2))
