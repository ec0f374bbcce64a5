"""Nodes that lose their cache, lie, fail or come late, with the real apps around them."""

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedfrozen_app import client_app
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.handlers import train_handler
from tests.conftest import same_bits
from tests.server.bad_replies import (
    first_name,
    for_another_order,
    put,
    spoil_replies,
    with_missing_name,
    with_nan,
    with_torn_array,
)


def with_wrong_shape(message, reply):
    put(reply, first_name(reply), torch.zeros(3))


def with_wrong_type(message, reply):
    name = first_name(reply)
    put(reply, name, reply.content["arrays"][name].__dict__["tensor"].double())


def with_extra_name(message, reply):
    put(reply, "intruder", torch.zeros(3))


def without_examples(message, reply):
    reply.content["metrics"]["num-examples"] = 0


def unchanged_with_endless_examples(message, reply):
    """An update of zero, so that weight times norm is no warning."""
    base = train_handler.read_train(message)[1]
    for name, array in reply.content["arrays"].items():
        array.__dict__["tensor"].copy_(base[name])
    reply.content["metrics"]["num-examples"] = 1e300


def with_a_huge_figure(message, reply):
    reply.content["metrics"]["train_loss"] = 1e308


def with_a_warm_up_of_its_own(message, reply):
    reply.content["metrics"]["warmup"] = 1.0


def with_garbage(message, reply):
    return Message(RecordDict({"reply": ConfigRecord({"json": "{"})}), reply_to=message)


def with_nothing(message, reply):
    return Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_nan, "not finite"),
        pytest.param(with_wrong_shape, "has the shape (3,)", marks=pytest.mark.slow),
        (with_wrong_type, "has the type torch.float64"),
        pytest.param(with_missing_name, "lacks", marks=pytest.mark.slow),
        (with_extra_name, "intruder"),
        pytest.param(with_torn_array, "3 bytes for the shape", marks=pytest.mark.slow),
        (for_another_order, "another request"),
        pytest.param(without_examples, "claims 0 examples", marks=pytest.mark.slow),
        (unchanged_with_endless_examples, "claims 1e+300 examples"),
        pytest.param(with_a_huge_figure, "train_loss, which is too large", marks=pytest.mark.slow),
        (with_a_warm_up_of_its_own, "warmup, which neither its algorithm nor its strategy declares"),
        (with_garbage, "no readable reply"),
        pytest.param(with_nothing, "no readable reply", marks=pytest.mark.slow),
    ],
)
def test_a_bad_reply_is_set_aside_and_the_round_goes_on(train, monkeypatch, change, sentence):
    spoil_replies(monkeypatch, change, clients=("1",), rounds=(2,))
    run = train("num_rounds=2")
    row = run.rows[2]
    assert row["clients_ok"] == 2 and row["clients_failed"] == 1
    (failure,) = row["failures"]
    assert failure.startswith("Client 1 was set aside") and sentence in failure
    assert not same_bits(run.model_after(1), run.model)
    assert all(torch.isfinite(value).all() for value in run.model.values())


def test_a_round_without_a_sound_reply_leaves_the_model_as_it_was(train, monkeypatch, caplog):
    spoil_replies(monkeypatch, with_nan, clients=("0", "1", "2"), rounds=(2,))
    run = train("checkpoint.keep=9")
    assert same_bits(run.model_after(1), run.model_after(2))
    assert not same_bits(run.model_after(2), run.model_after(3))
    assert run.rows[2]["clients_ok"] == 0 and run.rows[2]["drift"] == {}
    assert "the model stays as it was" in caplog.text


def test_a_run_in_which_nobody_ever_answers_has_failed(train, monkeypatch):
    spoil_replies(monkeypatch, with_nan, clients=("0", "1", "2"), rounds=(1, 2, 3))
    with pytest.raises(RunFailed, match="not finite"):
        train()


def test_an_exception_in_one_client_is_not_the_run_s(train, monkeypatch):
    def explode(message, reply):
        raise RuntimeError("out of luck")

    spoil_replies(monkeypatch, explode)
    run = train("num_rounds=2")
    assert "RuntimeError: out of luck" in run.rows[2]["failures"][0]


@pytest.mark.parametrize("lost_in", [2, 4])  # before and after the freeze
@pytest.mark.slow
def test_a_lost_cache_is_filled_again_in_the_same_round(train, monkeypatch, lost_in):
    settings = ("num_rounds=4", "strategy.warmup_rounds=2")
    whole = train(*settings, folder="whole")
    real = Cache.complete

    def forget(self, base, sent, *, verify):
        if len(sent) < len(base) and lost["round"] == lost_in and not lost["done"]:
            lost["done"] = True
            self._memory.clear()
        return real(self, base, sent, verify=verify)

    lost = {"round": 0, "done": False}
    watch_rounds(monkeypatch, lost)
    monkeypatch.setattr(Cache, "complete", forget)
    run = train(*settings, folder="lost")
    assert same_bits(whole.model, run.model)
    assert all(row["clients_failed"] == 0 for row in run.rows[1:])
    if lost_in == 4:  # in a warm-up round everything is sent anyway: there is nothing to lose
        assert lost["done"]
        assert run.rows[lost_in]["bytes_down"] > whole.rows[lost_in]["bytes_down"]


@pytest.mark.slow
def test_a_client_that_joins_after_the_freeze_gets_the_kernel(train):
    run = train("num_clients=8", "participation=0.25", "partition=iid", "num_rounds=8")
    seen = set()
    for row in run.rows[1:]:
        fresh = set(row["clients"]) - seen
        seen |= fresh
        if row["stage"] == "frozen" and fresh:
            assert row["bytes_down_by_role"]["query"] > 0
    assert all(row["clients_failed"] == 0 for row in run.rows[1:])


@pytest.mark.parametrize("name", ["²", "9" * 5000, "a\nround 3: accuracy 1.0", ""])
def test_a_node_with_a_name_that_is_none_leaves_the_others_alone(train, monkeypatch, name):
    real = client_app.app

    def app(message, context):
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == 2:
            return hello_reply(message, Hello(name, 3))
        return real(message, context)

    monkeypatch.setattr(client_app, "app", app)
    run = train("num_rounds=1", "++runtime.min_nodes=2", "++runtime.node_timeout=1")
    assert run.rows[1]["clients_ok"] >= 2 and {"0", "1"} <= set(run.rows[1]["clients"]) <= {"0", "1", "²"}


def watch_rounds(monkeypatch, state):
    real = client_app.app

    def app(message, context):
        if message.metadata.message_type == "train":
            state["round"] = int(message.metadata.group_id)
        return real(message, context)

    monkeypatch.setattr(client_app, "app", app)
