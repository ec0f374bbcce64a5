"""The trackers get what metrics.jsonl gets: read back from the files that their own libraries wrote."""

import json
import math
import sys

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import TrackConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.report.track import Tracking, scalars
from tests.conftest import slowly

SHORT = ("num_rounds=2", "num_clients=2", "strategy.warmup_rounds=1")


def test_scalars_are_the_numbers_of_a_row():
    row = {
        "round": 3,
        "stage": "frozen",
        "test_accuracy": 0.5,
        "clients": ["0", "1"],
        "clients_ok": 2,
        "done": True,
        "drift": {"rest": {"rms": 1.5}},
        "by_client": {"client_val_after": {"0": 0.1}},
        "selection": {"0": [1, 2]},
        "epsilon": {"0": 1.2, "north": 0.7},
    }
    assert scalars(row) == {"test_accuracy": 0.5, "clients_ok": 2.0, "drift/rest/rms": 1.5}


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: {e.step: e.value for e in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


@pytest.mark.slow
def test_tensorboard_holds_every_round_and_a_resumed_run_goes_on(train):
    run = train("num_rounds=2", "num_clients=2")
    train("num_rounds=3", "num_clients=2", resume=True)
    found = events(run.folder / "tensorboard")
    assert found["test_accuracy"] == pytest.approx({row["round"]: row["test_accuracy"] for row in run.rows})
    assert list(found["bytes_up_by_role/query"]) == [1]  # the kernel is frozen from round 2 on
    assert found["seconds/total"].keys() == {0, 1, 2, 3}
    before = set((run.folder / "tensorboard").iterdir())
    train("num_rounds=1", "num_clients=2")
    assert not before & set((run.folder / "tensorboard").iterdir())
    assert events(run.folder / "tensorboard")["test_accuracy"].keys() == {0, 1}


def test_it_can_be_switched_off(train):
    run = train("num_rounds=1", "num_clients=2", "track.tensorboard=false")
    assert not (run.folder / "tensorboard").exists()
    assert not (run.folder / "tracking.json").exists()


@pytest.mark.parametrize("name", ["wandb", *slowly("mlflow")])
def test_a_missing_library_is_named_before_anything_runs(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [Without(name, sys.meta_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert command([f"track.{name}=true", f"output_dir={tmp_path / 'run'}"]) == 2
    assert f"pip install 'fedfrozen[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(UserError, match="not installed"), Tracking(TrackConfig(**{name: True}), {}, tmp_path):
        pass


class Without:
    """The real finders, with this one package missing."""

    def __init__(self, name, finders):
        self.name, self.finders = name, list(finders)

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)


@pytest.mark.slow
def test_mlflow_holds_the_run(train, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra mlflow)")
    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    run = train(*SHORT, "track.mlflow=true", "track.project=trial")
    train("num_rounds=3", *SHORT[1:], "track.mlflow=true", "track.project=trial", resume=True)
    client = mlflow.MlflowClient(store)
    (kept,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.params["strategy.name"] == "fedfrozen"
    history = client.get_metric_history(kept.info.run_id, "test_accuracy")
    assert {one.step: one.value for one in history} == {
        row["round"]: row["test_accuracy"] for row in run.rows
    }
    assert json.loads((run.folder / "tracking.json").read_text()) == {"mlflow": kept.info.run_id}


@pytest.mark.slow
def test_wandb_offline_writes_the_run(train, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train(*SHORT, "track.wandb=true")
    (file,) = (run.folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (b"test_accuracy", b"drift/rest/rms", b"warmup_rounds"):
        assert text in content
    assert not math.isnan(run.rows[-1]["test_accuracy"])
