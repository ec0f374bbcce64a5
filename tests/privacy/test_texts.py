"""Texts: a LLaMA under SAFL with privacy, and patients with several notes."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from transformers import LlamaConfig, LlamaForSequenceClassification

from fedfrozen_app import client_app
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.messages import train_content, train_message
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.private_units import units_of
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid

WEIGHTS = Path(os.environ.get("FEDFROZEN_WEIGHTS", "/nowhere"))  # a folder that holds stories15m
PRIVATE = ("privacy=dp_sgd", "client.local_steps=2", "num_rounds=2", "partition=iid", "num_clients=2")


@pytest.fixture
def notes(tmp_path):
    """90 short notes of 30 patients."""
    lines = ["text,label,patient,ward"]
    lines += [f"{'good ' * (n % 7)}note {n},{n % 2},p{n % 30},w{n % 3}" for n in range(90)]
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(lines))
    return ("dataset=text", f"dataset.path={path}", "dataset.max_tokens=24", "runtime.threads=1")


def llama(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def check_llama(train, notes, folder, k, *more):
    run = train(
        "strategy=safl",
        f"strategy.top_k={k}",
        "model=checkpoint",
        f"model.path={folder}",
        *notes,
        *PRIVATE,
        *more,
        small=False,
    )
    last = run.rows[-1]
    assert last["clients_ok"] == 2 and last["epsilon_max"] == pytest.approx(8.0, rel=0.01)
    chosen = {layer for row in run.rows[1:] for layers in row["selection"].values() for layer in layers}
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=2)
    roles = roles_of(model)
    start = dict(model.named_parameters())
    for name, value in run.model.items():
        trained = (
            roles[name].kind == "head" or roles[name].layer in chosen or name.endswith("model.norm.weight")
        )
        if roles[name].kind != "head":  # a fresh head is drawn from the run's seed
            assert torch.equal(value, start[name].detach()) != trained, name
    return run


@pytest.mark.slow
def test_a_tiny_llama_trains_under_safl_with_privacy(train, notes, tmp_path):
    run = check_llama(train, notes, llama(tmp_path / "llama"), k=1)
    assert run.summary["private"] is True
    budget = BudgetFile(run.folder / "privacy", "0").read()
    assert budget.selection_noise is not None and len(budget.layers) == 1


@pytest.mark.slow
@pytest.mark.skipif(not (WEIGHTS / "stories15m").exists(), reason="FEDFROZEN_WEIGHTS holds no stories15m")
@pytest.mark.parametrize("clipping", ["per_example", "ghost"])
def test_stories15m_trains_under_safl_with_privacy(train, notes, clipping):
    check_llama(train, notes, WEIGHTS / "stories15m", 2, f"privacy.clipping={clipping}")


@pytest.mark.slow
def test_the_same_file_by_another_path_is_the_same_file(train, notes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["strategy=fedavg", "model=bert_tiny", *notes, *PRIVATE]
    train(*words, "num_rounds=1", small=False)
    run = train(*words, "dataset.path=notes.csv", "num_rounds=2", small=False, resume=True)
    assert len(run.rows) == 3


def site_context(tmp_path, given):
    context = Context(0, 1, {"site": "a", "data-path": str(tmp_path / "notes.csv")}, RecordDict(), {})
    context.run_config = {"overrides": shlex.join(given)}
    data_spec = {"classes": ["0", "1"], "mean": [], "std": []}
    context.state["card"] = ConfigRecord({"json": json.dumps(data_spec)})
    return context


def at_a_site(notes, tmp_path, *words):
    """The rows that a site would train on, as texts."""
    given = ["strategy=fedavg", "model=bert_tiny", *notes, "dataset.max_tokens=64", *words]
    worker = workers._build_for(site_context(tmp_path, given))
    rows = worker.rows("a").train
    return {tuple(text) for text in worker.train_table.inputs["input_ids"][rows].tolist()}


def test_at_a_site_one_note_more_is_one_row_more(notes, tmp_path):
    """Test rows drawn by class would be others with one note more, and so would the train rows."""
    one_more = at_a_site(notes, tmp_path, "privacy=dp_sgd")
    lines = (tmp_path / "notes.csv").read_text().splitlines()
    (tmp_path / "notes.csv").write_text("\n".join(lines[:1] + lines[2:]))
    without = at_a_site(notes, tmp_path, "privacy=dp_sgd")
    assert len(without) == 89 and len(one_more - without) == 1 and without < one_more
    assert len(at_a_site(notes, tmp_path)) < 89  # without privacy a site can judge its own model
    with pytest.raises(UserError, match=r"dataset\.limit"):
        at_a_site(notes, tmp_path, "privacy=dp_sgd", "dataset.limit=50")


def test_what_a_site_stumbles_over_stays_there(notes, tmp_path, caplog):
    """Flower sends an exception's text to the server, and ours quote what they could not read."""
    path = tmp_path / "notes.csv"
    path.write_text(path.read_text() + "\nseen again,John Doe,p99,w0")
    context = site_context(tmp_path, ["strategy=fedavg", "model=bert_tiny", *notes, "privacy=dp_sgd"])
    grid = InProcessGrid(client_app.app, 1, {})
    grid.contexts[1] = context
    request = TrainRequest(1, Plan((), ()), {})
    message = train_message(1, request, train_content(request, {}, local=False), ttl=60)
    (answer,) = grid.send_and_receive([message])
    assert "its own log says why" in answer.error.reason and "John" not in answer.error.reason
    assert "Label 'John Doe'" in caplog.text


def test_a_row_without_a_patient_is_named(train, notes, tmp_path):
    """Rows of many patients would else be one unit, and each of them covered by half of what is claimed."""
    text = (tmp_path / "notes.csv").read_text()
    (tmp_path / "notes.csv").write_text(re.sub(",p.,", ", ,", text))
    words = ["strategy=fedavg", "model=bert_tiny", *notes, *PRIVATE, "num_rounds=1", "privacy.unit=patient"]
    with pytest.raises(UserError, match="row of client 0 names no patient in its column 'patient'"):
        train(
            *(w for w in words if not w.startswith(("partition", "num_clients"))),
            "num_clients=1",
            small=False,
        )


@pytest.mark.slow
def test_a_patient_is_one_unit_and_is_not_split(train, notes, monkeypatch):
    words = ["strategy=fedavg", "model=bert_tiny", *notes, *PRIVATE, "privacy.unit=patient", "num_rounds=1"]
    with pytest.raises(UserError, match="The patient p0 has rows at client 0 and at another"):
        train(*words, small=False)
    seen = {}

    def watch(worker, client):
        seen[client] = units_of(worker, client)
        return seen[client]

    monkeypatch.setattr("fedfrozen_app.local.private.units_of", watch)
    by_ward = [word for word in words if not word.startswith(("partition", "num_clients"))]
    run = train(*by_ward, "partition=natural", "partition.column=ward", folder="wards", small=False)
    assert run.summary["privacy_unit"] == "patient"
    # Patients come back every 30 notes and wards every 3, so a patient's notes are all in one ward.
    assert len(seen) == 3 and all(max(map(len, units)) > 1 for units in seen.values())
    for client, units in seen.items():
        assert BudgetFile(run.folder / "privacy", client).read().declared == len(units)
