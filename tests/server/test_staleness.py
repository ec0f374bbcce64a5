"""Two clients by hand in float64: softmax regression, one step of gradient descent on all rows of a client.

u(w) = −η ∇f(w), so that every model of the server follows from the schedule and the weights of staleness.
"""

from math import sqrt

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.run.step_operations import operations_per_row
from tests.conftest import worker_of

LR = 0.5
WORDS = (
    *("strategy=fedavg", "dataset=digits", "dataset.limit=100", "model=linear", "model.dtype=float64"),
    *(
        "partition=iid",
        "num_clients=2",
        "num_rounds=4",
        "device=cpu",
        "checkpoint.every=1",
        "checkpoint.keep=9",
    ),
    *("client=sgd", f"client.lr={LR}", "client.lr_schedule=constant", "client.batch_size=1000"),
    *("client.momentum=0", "client.weight_decay=0", "client.local_epochs=1", "runtime.runner=sequential"),
    *("clock=profiles", "clock.distribution=equal", "clock.uplink=1e12", "clock.downlink=1e12"),
)


class ByHand:
    """Client 0 takes `unit` seconds for a request, client 1 two and a half times as long."""

    def __init__(self, folder) -> None:
        self.worker = worker = worker_of(*WORDS)
        self.start = {name: value.detach().clone() for name, value in worker.exchanged.items()}
        self.rows = {client: len(worker.rows(client).train) for client in ("0", "1")}
        self.file = folder / "speeds.csv"
        self.file.write_text(f"client,speed\n0,{2.5 * self.rows['0']}\n1,{self.rows['1']}\n")
        self.unit = operations_per_row(worker, set(worker.parameters)) / 2.5e9

    def update(self, client, model):
        """u(w) = −η (1/n) Σ (softmax(Wx + b) − y) xᵀ."""
        batch, labels = self.worker.take(self.worker.rows(client).train)
        pictures = self.worker.task.prepare(batch)["pixel_values"].flatten(1)
        weight, bias = (next(n for n in model if n.endswith(end)) for end in ("weight", "bias"))
        wrong = torch.softmax(pictures @ model[weight].T + model[bias], 1)
        wrong = (wrong - torch.nn.functional.one_hot(labels, wrong.shape[1])) / len(labels)
        return {weight: -LR * wrong.T @ pictures, bias: -LR * wrong.sum(0)}


def plus(model, *parts):
    """w + Σ share · u."""
    return {name: value + sum(share * u[name] for share, u in parts) for name, value in model.items()}


def assert_models(run, expected):
    for number, model in enumerate(expected, 1):
        found = load_file(run.folder / "checkpoints" / str(number) / "model.safetensors")
        for name, value in model.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-13), (number, name)


def test_a_buffer_of_one(train, tmp_path):
    """Replies: 0 at 1, 0 at 2, 1 at 2.5 (asked at 0: two steps old), 0 at 3 (asked at 2: one step old)."""
    hand = ByHand(tmp_path)
    pacing = ("pacing=buffered", "pacing.concurrency=2", "pacing.buffer=1", f"clock.file={hand.file}")
    run = train(*WORDS, *pacing, small=False)
    one = plus(hand.start, (1, hand.update("0", hand.start)))
    two = plus(one, (1, hand.update("0", one)))
    three = plus(two, (1 / sqrt(3), hand.update("1", hand.start)))
    four = plus(three, (1 / sqrt(2), hand.update("0", two)))
    assert_models(run, [one, two, three, four])
    times = [row["virtual_seconds"] / hand.unit for row in run.rows]
    assert times == pytest.approx([0, 1, 2, 2.5, 3], rel=1e-5)
    assert [row["pacing"]["used"] for row in run.rows[1:]] == [[["0", 0]], [["0", 0]], [["1", 2]], [["0", 1]]]


def one_is_late(hand):
    """Rounds close after 1.5 units, and client 1 takes longer."""
    limit = f"pacing.seconds={1.5 * hand.unit}"
    return "pacing=deadline", limit, "pacing.share=1", f"clock.file={hand.file}"


@pytest.mark.parametrize(
    ("words", "factor"), [((), 1 / sqrt(2)), (("pacing.staleness_weight=inverse",), 1 / 2)]
)
def test_a_late_reply_in_the_mean_of_a_round(train, tmp_path, words, factor):
    """Round 1 closes after 1.5 units without client 1, whose reply arrives with client 0's second one."""
    hand = ByHand(tmp_path)
    run = train(*WORDS, *one_is_late(hand), *words, small=False)
    n0, n1 = hand.rows["0"], hand.rows["1"]
    one = plus(hand.start, (1, hand.update("0", hand.start)))
    shares = n0 / (n0 + n1), factor * n1 / (n0 + n1)
    two = plus(one, (shares[0], hand.update("0", one)), (shares[1], hand.update("1", hand.start)))
    assert_models(run, [one, two])
    assert [row["clients"] for row in run.rows[1:3]] == [["0"], ["0", "1"]]
    assert run.rows[1]["pacing"]["at_work"] == ["1"]


def test_a_dropped_reply_changes_nothing(train, tmp_path):
    hand = ByHand(tmp_path)
    run = train(*WORDS, *one_is_late(hand), "pacing.late=drop", "num_rounds=2", small=False)
    one = plus(hand.start, (1, hand.update("0", hand.start)))
    assert_models(run, [one, plus(one, (1, hand.update("0", one)))])
    assert run.rows[2]["pacing"]["dropped"] == [["1", 1]] and run.rows[2]["clients_dropped"] == 1
