"""A client leaves runs of every kind: coded uploads, pacing, parts of their own, very many clients, Ray."""

import json

import numpy as np
import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.files.rows import first_rounds
from tests.conftest import SMALL, Run, same_bits
from tests.forget.test_forget import latest, never_there
from tests.resuming import killed_before_checkpoint, without_times

__all__ = ["never_there"]  # a fixture
WORDS = [
    *(*SMALL, "num_clients=5", "num_rounds=4", "participation=0.4", "baseline=false", "seed=3"),
    *("client=sgd", "client.weight_decay=0"),
]
KEEP = ["checkpoint.rollback=true", "checkpoint.keep=1"]
CLOCK = ["clock=profiles", "clock.uplink=1", "clock.spread=2"]
KINDS = {
    "what a code left out": ["strategy=fedavg", "codec=topk"],
    "coded by int4": ["strategy=fedavg", "codec=int4"],
    "control variates": ["strategy=scaffold"],
    "parts of their own": ["strategy=fedper"],
    "layers of their choice": ["strategy=safl", "strategy.top_k=1"],
    "adapters": ["strategy=fedavg", "adapter=lora"],
    "a buffer": ["strategy=fedavg", *CLOCK, "pacing=buffered", "pacing.concurrency=2", "pacing.buffer=1"],
    "a deadline": ["strategy=fedavg", *CLOCK, "pacing=deadline", "pacing.share=0.5"],
    "several at once": ["strategy=fedavg", "runtime.runner=cohort"],
}


def words_of(kind):
    words = [*WORDS, *KINDS[kind]]
    at_work = any(word.startswith("pacing.concurrency") for word in words)
    return [word for word in words if not (at_work and word.startswith("participation"))]


def test_with_pacing_a_client_s_first_round_is_the_one_that_asked_it():
    """Its reply may count later, and until then a checkpoint holds it."""
    rows = [
        {"round": 0},
        {"round": 1, "clients": ["0"], "virtual_asked": {"0": 0.0, "1": 0.0}},
        {"round": 2, "clients": ["1"], "virtual_asked": {"0": 3.0, "2": 3.0}},
        {"round": 3, "clients": ["3"]},
    ]
    assert first_rounds(rows) == {"0": 1, "1": 1, "2": 2, "3": 3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_a_run_which_the_client_never_joined(kind, train, never_there, tmp_path):
    words, out = words_of(kind), tmp_path / "without"
    run = train(*words, *KEEP, small=False)
    client, firsts = latest(run)
    start = firsts[client] - 1
    assert start > 0
    assert command(["forget", str(run.folder), "--client", client, "--out", str(out)]) == 0
    left = Run(out)
    never_there(client)
    expected = train(*words, f"from={run.folder}/checkpoints/{start}", folder="expected", small=False)
    assert same_bits(left.model, expected.model) and not same_bits(left.model, run.model)
    assert [without_times(row) for row in left.rows] == [without_times(row) for row in expected.rows]
    assert client not in first_rounds(left.rows)
    for path in (out / "checkpoints").rglob("*.json"):  # nor does it wait in a queue
        assert f'"client": "{client}"' not in path.read_text()


@pytest.mark.slow
def test_a_paced_call_that_is_killed_goes_on_where_it_was(train, tmp_path, monkeypatch):
    run = train(*words_of("a buffer"), *KEEP, small=False)
    client, _ = latest(run)
    words = ["forget", str(run.folder), "--client", client, "--out"]
    assert command([*words, str(tmp_path / "whole")]) == 0
    with killed_before_checkpoint(monkeypatch, 4):
        command([*words, str(tmp_path / "broken")])
    assert command([*words, str(tmp_path / "broken")]) == 0
    assert same_bits(Run(tmp_path / "broken").model, Run(tmp_path / "whole").model)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_ray_it_is_the_model_of_one_process(train, tmp_path):
    words = [*WORDS, "strategy=scaffold", "model.dtype=float64", "dataset.validation=0.2", *KEEP]
    found = {}
    for name, more in (("one", []), ("ray", ["runtime=ray", "runtime.workers=2"])):
        run, out = tmp_path / name, tmp_path / f"{name}-without"
        assert command([*words, *more, f"output_dir={run}"]) == 0
        client, _ = latest(Run(run))
        assert command(["forget", str(run), "--client", client, "--out", str(out)]) == 0
        found[name] = Run(out)
    assert [row.get("clients") for row in found["ray"].rows] == [r.get("clients") for r in found["one"].rows]
    for name, value in found["one"].model.items():
        torch.testing.assert_close(found["ray"].model[name], value, rtol=1e-9, atol=1e-12)
    rules = []
    for one in found.values():
        assert command(["calibrate", str(one.folder), "--rows", "server", "--coverage", "0.6"]) == 0
        rules.append(json.loads((one.folder / "calibration.json").read_text()))
    assert rules[0]["threshold"] == pytest.approx(rules[1]["threshold"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_very_many_clients_leaves(tmp_path, capsys):
    """Beyond 10,000 clients no file lists them; forget, and calibrate on rows of some of them."""
    generator, data, run, out = (
        np.random.default_rng(0),
        tmp_path / "data",
        tmp_path / "run",
        tmp_path / "out",
    )
    clients = 10_050
    for split, rows in (("train", 2 * clients), ("test", 200)):
        (data / split).mkdir(parents=True)
        numbers = generator.standard_normal((rows, 4), dtype=np.float32)
        np.save(data / split / "numbers.npy", numbers)
        np.save(data / split / "labels.npy", (numbers[:, 0] > 0).astype(int))
    words = [
        *("strategy=fedavg", "dataset=arrays", f"dataset.path={data}", "dataset.validation=0.05"),
        *("model=mlp", "model.config.hidden_size=4", "client=sgd", "client.lr=0.1", "partition=iid"),
        *(f"num_clients={clients}", "partition.min_size=1", "participation=0.001", "num_rounds=3"),
        *("track.tensorboard=false", "dataset.client_validation=0", "baseline=false", "runtime.threads=1"),
    ]
    assert command([*words, *KEEP, f"output_dir={run}"]) == 0
    client, firsts = latest(Run(run))
    assert firsts[client] == 3 and not (run / "clients.json").exists()
    assert command(["forget", str(run), "--client", client, "--out", str(out)]) == 0
    assert json.loads((out / "forget.json").read_text())["restarted_after_round"] == 2
    assert client not in first_rounds(Run(out).rows)
    same = [without_times(row) for row in Run(run).rows[:3]]
    assert [without_times(row) for row in Run(out).rows[:3]] == same
    capsys.readouterr()
    assert command(["forget", str(run), "--client", str(clients)]) == 2
    assert f"has no client {clients}" in capsys.readouterr().err
    for folder in (run, out):
        assert command(["calibrate", str(folder), "--rows", "server"]) == 0
        found = json.loads((folder / "calibration.json").read_text())
        assert found["rows"]["source"] == "server" and found["threshold"] > 0
