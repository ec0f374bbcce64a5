"""Runs of many clients are those of few: the same models, whatever is listed, greeted or on disk."""

import json

import pytest
import torch
from flwr.app import ConfigRecord

from fedfrozen_app.core import quantiles
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.files.client_segments import ClientSegments
from fedfrozen_app.report import data_section
from fedfrozen_app.run import data_record, evaluation
from fedfrozen_app.runtimes.inprocess import grid, node_contexts, runtime
from fedfrozen_app.runtimes.inprocess.node_contexts import NodeContexts
from tests.conftest import same_bits
from tests.resuming import resumed_and_whole, without_times

TINY = ("num_clients=6", "participation=0.5", "num_rounds=3")
OWN = ("strategy=fedper", *TINY, "num_rounds=4", "participation=0.7")


@pytest.fixture
def many(monkeypatch):
    """Treat six clients as too many to be greeted or listed."""

    def treat() -> None:
        monkeypatch.setattr(grid, "GREETED", 2)
        for module in (evaluation, data_record):
            monkeypatch.setattr(module, "LISTED", 3)

    return treat


@pytest.fixture
def on_disk(monkeypatch):
    """No byte of what clients keep may stay in memory between two rounds."""
    monkeypatch.setattr(runtime, "STATES_IN_MEMORY", 0)


def test_neither_names_nor_greetings_change_a_run(train, many):
    few = train(*TINY, folder="few")
    many()
    run = train(*TINY, folder="many")
    assert same_bits(few.model, run.model)
    assert [without_times(row) for row in run.rows] == [without_times(row) for row in few.rows]
    assert not (run.folder / "clients.json").exists()
    data = json.loads((run.folder / "data.json").read_text())
    before = json.loads((few.folder / "data.json").read_text())
    sizes = [one["rows"] for one in before["clients"].values()]
    bands = data["client_bands"]
    assert data["clients"] == {} and bands["clients"] == 6
    assert (bands["rows"]["p0"], bands["rows"]["p100"]) == (min(sizes), max(sizes))
    assert bands["rows"] == quantiles.quantiles(sizes)
    table = data_section.data_section(data)["table"]
    assert [row[0] for row in table.body][-1] == "6 clients: the largest"
    fairness = json.loads((run.folder / "fairness.json").read_text())["models"]["global"]
    assert "site" not in fairness["groups"] and fairness["client_bands"]["clients"] <= 6
    assert "Over" in (run.folder / "report.html").read_text()


def test_a_resumed_run_finds_the_states_on_disk(train, monkeypatch, on_disk):
    resumed, whole = resumed_and_whole(train, monkeypatch, *OWN)
    for run in (resumed, whole):
        assert list((run.folder / "client_states").glob("*.safetensors"))
        state = json.loads((run.folder / "checkpoints/4/state.json").read_text())
        assert state["client_segments"] and not (run.folder / "checkpoints/4/clients.safetensors").exists()
        named = {f"{number}.safetensors" for number in state["client_segments"]}
        assert named <= {path.name for path in (run.folder / "client_states").iterdir()}


@pytest.mark.slow
def test_states_on_disk_are_those_in_memory(train, monkeypatch):
    memory = train(*OWN, folder="memory")
    monkeypatch.setattr(runtime, "STATES_IN_MEMORY", 0)
    disk = train(*OWN, folder="disk")
    assert same_bits(memory.model, disk.model)
    assert [without_times(row) for row in disk.rows] == [without_times(row) for row in memory.rows]
    assert not (memory.folder / "client_states").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("secure_aggregation=on", "secure_aggregation.min_cohort=2"),
        ("privacy=dp_sgd", "privacy.epsilon=8", "privacy.delta=1e-3", "privacy.seeded_noise=true"),
    ],
)
def test_masks_and_privacy_are_those_of_few_clients(train, many, words):
    few = train(*TINY, *words, folder="few")
    many()
    run = train(*TINY, *words, folder="many")
    assert same_bits(few.model, run.model)
    assert [row.get("epsilon") for row in run.rows] == [row.get("epsilon") for row in few.rows]


def test_contexts_leave_the_memory_and_come_back(tmp_path):
    contexts = NodeContexts(50, {})
    contexts.spill_to(ClientSegments(tmp_path), 100)
    for node in range(1, 11):
        contexts[node].state["private"] = to_record({"w": torch.full((5,), float(node))}, local=True)
    contexts.trim()  # 200 bytes of at most 100: all are written, and the two asked last stay
    assert [context.node_id for context in contexts.made()] == [9, 10]
    assert to_tensors(contexts[3].state["private"])["w"].tolist() == [3.0] * 5
    assert "private" not in contexts[20].state
    contexts[3].state["private"] = to_record({"w": torch.zeros(5)}, local=True)
    contexts.write_changed()
    assert contexts.spilled
    again = NodeContexts(50, {})
    segments = ClientSegments(tmp_path)
    segments.restore(contexts._segments.named(), tmp_path)
    again.spill_to(segments, 100)
    values = [float(to_tensors(again[node].state["private"])["w"][0]) for node in range(1, 11)]
    assert values == [1, 2, 0, 4, 5, 6, 7, 8, 9, 10]


def test_idle_contexts_are_dropped_between_rounds_alone(monkeypatch):
    monkeypatch.setattr(node_contexts, "IDLE", 4)
    contexts = NodeContexts(50, {})
    held = [contexts[node] for node in range(1, 9)]
    assert contexts.made() == held  # none while clients may be at work
    held[2].state["privacy"] = ConfigRecord({"rounds": 1})
    contexts.trim()
    assert contexts.made() == [held[2]] and contexts[1] is not held[0]
