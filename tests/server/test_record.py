"""A round's row: means by weight, and the accuracies client by client."""

import math
import time

import pytest
import torch

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.record import RoundRecord
from strategies.fedavg import FedAvg


def reply(examples, value, **metrics):
    return Reply("order", examples, {"w": torch.full((2,), value)}, metrics)


def test_a_mean_by_weight_beside_every_clients_own_value():
    record = RoundRecord(1, RunningMean({"w": torch.zeros(2)}, lambda name: "rest"))
    record.take("north", reply(1, 1.0, client_val_after=0.5, train_loss=2.0))
    record.take("south", reply(3, 1.0, client_val_after=0.9, train_loss=1.0))
    record.take("east", reply(5, float("nan"), client_val_after=0.1, train_loss=9.0))
    row = record.row("train", ["east", "north", "south"], 2, {})
    assert row["client_val_after"] == pytest.approx((0.5 + 3 * 0.9) / 4)
    assert row["train_loss"] == pytest.approx(1.25)
    # East's values are not finite: it was set aside, and so is what it said of itself.
    assert row["by_client"] == {"client_val_after": {"north": 0.5, "south": 0.9}}


def test_a_language_model_s_figures_count_by_tokens():
    record = RoundRecord(1, RunningMean({"w": torch.zeros(2)}, lambda name: "rest"))
    north = {"personal_loss": 1.0, "personal_perplexity": math.e, "personal_accuracy": 0.2}
    south = {"personal_loss": 3.0, "personal_perplexity": math.e**3, "personal_accuracy": 0.6}
    record.take(
        "north", reply(90, 1.0, **north, personal_tokens=100, client_val_after=0.5, client_val_tokens=1)
    )
    record.take(
        "south", reply(10, 1.0, **south, personal_tokens=300, client_val_after=0.8, client_val_tokens=2)
    )
    row = record.row("train", ["north", "south"], 2, {})
    # (100·1 + 300·3)/400, and not by rows (90·1 + 10·3)/100; a perplexity is that of the mean loss.
    assert row["personal_loss"] == pytest.approx(2.5)
    assert row["personal_perplexity"] == pytest.approx(math.exp(2.5))
    assert row["personal_accuracy"] == pytest.approx(0.5)
    assert row["personal_tokens"] == 400
    assert row["client_val_after"] == pytest.approx(0.7)


def test_clients_that_judge_nothing_leave_no_table():
    record = RoundRecord(1, RunningMean({"w": torch.zeros(2)}, lambda name: "rest"))
    record.take("north", reply(1, 1.0, train_loss=2.0))
    assert "by_client" not in record.row("train", ["north"], 2, {})


def test_as_many_replies_as_the_quorum_asks_for_are_enough():
    record = RoundRecord(1, RunningMean({"w": torch.zeros(2)}, lambda name: "rest"), quorum=0.56)
    for client in range(25):  # 0.56 · 25 is a little more than 14 in floating point
        record.take(str(client), reply(1, 1.0) if client < 14 else "did not answer")
    update = record.finish(25, 30)
    assert record.discarded is None and torch.equal(update.model["w"], torch.ones(2))
    assert (update.replies, update.population) == (14, 30)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_every_client_of_a_real_round_is_there(train, runner):
    row = train("num_rounds=1", f"runtime.runner={runner}", "num_clients=2", "partition.min_size=20").rows[1]
    assert set(row["by_client"]) == {"client_val_before", "client_val_after"}
    for key, values in row["by_client"].items():
        assert list(values) == row["clients"]
        assert min(values.values()) <= row[key] <= max(values.values())


def test_a_round_s_seconds_begin_after_its_plan(train, monkeypatch):
    """A strategy may take its time to plan; that is not the clients' training."""
    real, plan, ahead = time.perf_counter, FedAvg.plan, [0.0]

    def slow(strategy, server_round):
        ahead[0] += 1000.0
        return plan(strategy, server_round)

    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead[0])
    monkeypatch.setattr(FedAvg, "plan", slow)
    rows = train("strategy=fedavg", "num_rounds=1").rows
    assert rows[-1]["seconds"]["train"] < 1000 <= rows[-1]["seconds"]["total"]
