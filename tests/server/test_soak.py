"""Twenty nodes that drop out, come back or send garbage at random: the run goes on, and says so."""

import random
import resource

import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict

from fedfrozen_app import client_app
from tests.server.bad_replies import first_name, for_another_order, put, with_missing_name, with_torn_array

NODES = 20


def poison(message, reply):
    name = first_name(reply)
    put(reply, name, 1e6 * torch.ones_like(reply.content["arrays"][name].__dict__["tensor"]))


def not_finite(message, reply):
    name = first_name(reply)
    put(reply, name, torch.full_like(reply.content["arrays"][name].__dict__["tensor"], float("nan")))


def dead(message, reply):
    return Message(Error(code=3, reason="the node is gone"), reply_to=message)


def crash(message, reply):
    raise MemoryError


def garbage(message, reply):
    return Message(
        RecordDict({"reply": ConfigRecord({"json": "\x00{"}), "arrays": ConfigRecord()}), reply_to=message
    )


def wild_dtype(message, reply):
    reply.content["arrays"][first_name(reply)] = Array("complex999", (2,), "raw", b"12345678")


FAULTS = {
    dead: "the node is gone",
    crash: "MemoryError",
    garbage: "no readable reply",
    wild_dtype: "unknown type",
    not_finite: "not finite",
    with_torn_array: "bytes for the shape",
    with_missing_name: "lacks",
    for_another_order: "another request",
    poison: "far out",
}


def soak(train, monkeypatch, rounds):
    """The run; the faults that nodes ended a round with, (round, client) -> which; and the kinds thrown."""
    draw, thrown, kinds = random.Random(5), {}, set()
    real = client_app.app
    memory: list[int] = []

    def app(message, context):
        reply = real(message, context)
        if message.metadata.message_type != "train":
            return reply
        number, client = int(message.metadata.group_id), context.node_config["partition-id"]
        if client == 0:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        thrown.pop((number, str(client)), None)  # a node that was gone is asked again: its last answer counts
        # The first round tells what is usual; every node misbehaves in a fifth of the others.
        if number == 1 or draw.random() > 0.2:
            return reply
        fault = draw.choice(list(FAULTS))
        thrown[number, str(client)] = FAULTS[fault]
        kinds.add(fault)
        return fault(message, reply) or reply

    monkeypatch.setattr(client_app, "app", app)
    words = (f"num_clients={NODES}", "partition=iid", "partition.min_size=2", f"num_rounds={rounds}")
    settings = ("aggregation.far_out=50", "aggregation.quorum=0.25", "eval_every=50", "checkpoint.every=20")
    return train(*words, *settings, "participation=0.5", "client.lr=0.0005"), thrown, kinds, memory


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_fault_is_accounted_for_and_none_gets_in(train, monkeypatch, rounds):
    run, thrown, kinds, memory = soak(train, monkeypatch, rounds)
    assert len(run.rows) == rounds + 1
    for row in run.rows[1:]:
        wanted = {client: text for (number, client), text in thrown.items() if number == row["round"]}
        told = row.get("failures", [])
        assert row["clients_failed"] == len(told) == len(wanted)
        for client, text in wanted.items():
            (sentence,) = [line for line in told if line.startswith(f"Client {client} was set aside")]
            assert text in sentence
        assert row["clients_ok"] == len(row["clients"]) - len(wanted)
    assert all(torch.isfinite(value).all() and value.abs().max() < 100 for value in run.model.values())
    assert len(kinds) >= min(len(FAULTS), rounds // 2)
    if rounds >= 100:  # kilobytes; the high-water mark after the first quarter stays what it is
        assert memory[-1] - memory[len(memory) // 4] < 30_000
