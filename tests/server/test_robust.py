"""Robust aggregation by hand: five clients, one of them poison, over subsets of the names."""

import pytest
import torch

from fedfrozen_app.config import AggregationConfig
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.norms import NormGate
from fedfrozen_app.server.robust import closest, make_aggregator

MODEL = {"a": torch.zeros(2), "b": torch.ones(1)}


def fold(how, replies):
    mean = make_aggregator(how, MODEL, lambda name: "rest", None)
    refused = [
        mean.add({n: torch.tensor(v) for n, v in arrays.items()}, weight) for arrays, weight in replies
    ]
    return mean, refused


def finish(aggregator, model=MODEL):
    """The new values, by the server's plain step, and the drift."""
    update = aggregator.finish()
    strategy = PlannedFedAvg(Federation(connect(None, {})))
    strategy.model = model
    return strategy.step(update), update.drift


REPLIES = [
    ({"a": [1.0, 10.0], "b": [2.0]}, 1.0),
    ({"a": [2.0, 20.0], "b": [3.0]}, 1.0),
    ({"a": [3.0, 30.0], "b": [4.0]}, 1.0),
    ({"a": [4.0, 40.0], "b": [5.0]}, 1.0),
    ({"a": [1000.0, -1000.0], "b": [1e6]}, 100.0),
]


def test_trimmed_mean_by_hand():
    merged, drift = finish(fold(AggregationConfig("trimmed_mean", trim=0.2), REPLIES)[0])
    # One of five cut at either end: a₀ of 2, 3, 4; a₁ of 10, 20, 30; b of 3, 4, 5.
    assert merged["a"].tolist() == [3.0, 20.0] and merged["b"].tolist() == [4.0]
    assert "rest" in drift


def test_median_by_hand():
    merged, _ = finish(fold(AggregationConfig("median"), REPLIES)[0])
    assert merged["a"].tolist() == [3.0, 20.0] and merged["b"].tolist() == [4.0]


def test_krum_leaves_the_poison_out_and_averages_the_rest():
    merged, _ = finish(fold(AggregationConfig("krum", malicious=1), REPLIES)[0])
    assert merged["a"].tolist() == [2.5, 25.0] and merged["b"].tolist() == [3.5]


def test_krum_scores_by_hand():
    held = [({"x": torch.tensor([value])}, 1.0) for value in (0.0, 1.0, 3.0, 4.0, 9.0)]
    # n = 5, f = 2: one neighbour each. Scores 1, 1, 1, 1, 25: the first three.
    assert closest(held, 2) == [0, 1, 2]
    # f = 1: two neighbours each. Scores 1+9, 1+4, 1+4, 1+9, 25+36: all but the last.
    assert closest(held, 1) == [0, 1, 2, 3]


def test_krum_with_too_few_changes_nothing():
    mean, _ = fold(AggregationConfig("krum", malicious=3), REPLIES)
    assert "needs 6" in mean.problem()


@pytest.mark.parametrize("name", ["trimmed_mean", "median"])
def test_each_name_over_those_that_sent_it(name):
    replies = [({"a": [1.0, 1.0]}, 1.0), ({"a": [3.0, 3.0], "b": [7.0]}, 1.0), ({"a": [8.0, 8.0]}, 1.0)]
    merged, _ = finish(fold(AggregationConfig(name, trim=0.34), replies)[0])
    assert merged["a"].tolist() == [3.0, 3.0] and merged["b"].tolist() == [7.0]


def test_far_out_is_set_aside_with_its_factor():
    gate = NormGate(far_out=10, median=2.0)
    mean = RunningMean({"a": torch.zeros(1)}, lambda name: None, gate)
    assert mean.add({"a": torch.tensor([19.0])}, 1) is None
    assert "30 times the usual" in mean.add({"a": torch.tensor([60.0])}, 1)
    assert mean.add({"a": torch.tensor([21.0])}, 1) is not None
    merged, _ = finish(mean, {"a": torch.zeros(1)})
    assert merged["a"].item() == 19.0 and gate.median() == 19.0


def test_without_a_round_before_nothing_is_far_out():
    gate = NormGate(far_out=2, median=None)
    assert gate.problem(1e9) is None and gate.problem(2e9) is None
    assert gate.median() == 1.5e9


@pytest.mark.parametrize("runner", [pytest.param("sequential", marks=pytest.mark.slow), "cohort"])
@pytest.mark.slow
def test_a_poisoned_run_and_its_cures(train, monkeypatch, runner):
    """One client of five sends its update times 500 in every round but the first."""
    from fedfrozen_app.server import reply_check

    real = reply_check.read_reply

    def poison(message):
        reply = real(message)
        if int(message.metadata.group_id) > 1 and message.metadata.src_node_id == 2 and len(reply.arrays):
            reply.arrays = {name: 500 * value.clone() for name, value in reply.arrays.items()}
        return reply

    monkeypatch.setattr(reply_check, "read_reply", poison)
    words = ("num_clients=5", "partition=iid", f"runtime.runner={runner}", "num_rounds=3")
    size = {}
    for cure in ("mean", "trimmed_mean", "median", "krum"):
        run = train(*words, f"aggregation={cure}", "aggregation.malicious=1", folder=cure)
        size[cure] = sum(value.norm().item() for value in run.model.values())
    gated = train(*words, "aggregation.far_out=20", folder="gated")
    size["far_out"] = sum(value.norm().item() for value in gated.model.values())
    assert all(size[cure] < size["mean"] / 2 for cure in size if cure != "mean"), size
    assert all("far out" in row["failures"][0] for row in gated.rows[2:])
    assert gated.rows[1]["clients_ok"] == 5 and gated.rows[3]["clients_ok"] == 4


def test_below_the_quorum_the_model_stays(train, monkeypatch):
    from tests.server.bad_replies import spoil_replies, with_nan

    spoil_replies(monkeypatch, with_nan, clients=("0", "1"), rounds=(2,))
    run = train("aggregation.quorum=0.5", "checkpoint.keep=9")
    assert "1 of 3 replies were sound, fewer than its quorum" in run.rows[2]["discarded"]
    for name, value in run.model_after(1).items():
        assert torch.equal(value, run.model_after(2)[name])
    assert "discarded" not in run.rows[3]


@pytest.mark.slow
def test_far_out_resumes_as_it_was(train):
    words = ("aggregation.far_out=3", "client.lr_schedule=constant", "strategy.warmup_rounds=1")
    train(*words, "num_rounds=2", folder="broken")
    broken = train(*words, "num_rounds=4", folder="broken", resume=True)
    short = train(*words, "num_rounds=4", folder="straight")
    assert short.rows[4]["usual_norm"] > 0
    assert [row.get("usual_norm") for row in broken.rows] == [row.get("usual_norm") for row in short.rows]


def test_krum_of_clients_that_share_nothing_changes_nothing():
    mean = make_aggregator(
        AggregationConfig("krum", malicious=1), {"w": torch.zeros(1)}, lambda n: None, None
    )
    assert [mean.add({}, float(count)) for count in (1, 2, 3, 4)] == [None] * 4
    update = mean.finish()
    assert update.model == {} and update.replies == 4
