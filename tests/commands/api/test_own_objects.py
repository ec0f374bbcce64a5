"""Objects in place of names: their content, their record, and how another process gets or asks for them."""

import json
import os
import shlex
import stat
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedfrozen
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.api.calls import is_swept
from fedfrozen_app.commands.api.content import digest_of_class, digest_of_module
from fedfrozen_app.commands.api.own import overrides_for
from fedfrozen_app.core import own_objects, registry
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.core.own_objects import DIGEST, PLACE, handed_down, take_over
from fedfrozen_app.run.own_record import FILE, check_given

TINY = (
    *("num_rounds=2", "num_clients=2", "partition=iid", "track.tensorboard=false", "runtime.threads=1"),
    "runtime.runner=sequential",
)
PICTURES = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
DATA = (PICTURES, np.arange(60) % 3)


def half(value):
    return value / 2


@dataclass(frozen=True)
class Pull(fedfrozen.Algorithm):
    """A pull towards the round's model."""

    mu: float = 0.1

    def loss(self, parameters, batch, task, start):
        return task.loss(parameters, batch) + half(self.mu) * fedfrozen.squared_distance(
            parameters, start.anchor
        )


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(64, 3)
        self.roles = dict.fromkeys((name for name, _ in self.named_parameters()), "head")

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.outer(pixel_values.flatten(1)))


def net():
    torch.manual_seed(0)
    return Pixels()


def forget(monkeypatch):
    """As in a process that has just begun."""
    monkeypatch.setattr(registry, "REGISTERED", {})
    monkeypatch.setattr(own_objects, "KNOWN", {})
    monkeypatch.setattr(own_objects, "NAMES", {})


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    forget(monkeypatch)


SOURCE = '''
LIMIT = 3

def helper(x):
    return x + 1

class Base:
    scale = 2.0

    def run(self, x):
        return helper(x) * self.scale if x in {"a", "b", "c"} else LIMIT

class Own(Base):
    """What it does."""

    def other(self):
        return [n for n in range(3)]  # a list
'''


def digest_of(source):
    scope = {"__name__": "a_notebook"}
    exec(textwrap.dedent(source), scope)
    return digest_of_class(scope["Own"])


def test_a_class_is_its_code_and_what_that_uses():
    assert digest_of(SOURCE) == digest_of(
        "\n\n# moved down\n" + SOURCE.replace("What it does", "Said otherwise")
    )
    for old, new in (
        ("range(3)", "range(4)"),
        ("x + 1", "x + 2"),  # a function that it calls
        ("LIMIT = 3", "LIMIT = 4"),  # a value that it reads
        ("scale = 2.0", "scale = 3.0"),  # of its base
        ('"b", "c"', '"b", "d"'),
        ("class Own(Base)", "class Own"),
    ):
        assert old in SOURCE and digest_of(SOURCE) != digest_of(SOURCE.replace(old, new)), new


def test_a_module_is_its_weights_and_its_code():
    assert digest_of_module(net()) == digest_of_module(net().eval())
    other = net()
    with torch.no_grad():
        other.outer.weight[1, 2] += 1e-6
    assert digest_of_module(other) != digest_of_module(net())
    marked = net()
    marked.roles["outer.bias"] = "mlp"
    assert digest_of_module(marked) != digest_of_module(net())
    dropping = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate)) for rate in (0.1, 0.2)]
    for one in dropping:
        nn.init.ones_(one[0].weight), nn.init.zeros_(one[0].bias)
    assert digest_of_module(dropping[0]) != digest_of_module(dropping[1])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        folder = tmp_path_factory.mktemp("run") / "out"
        return fedfrozen.run(
            *TINY, "strategy.mu=0.5", algorithm=Pull, dataset=DATA, model=net(), output_dir=str(folder)
        )


def test_a_run_says_what_its_objects_were(done):
    told = json.loads((done.folder / "objects.json").read_text())["objects"]
    assert told == done.summary["objects"]
    assert [(one["argument"], one["word"], one["what"]) for one in told] == [
        ("dataset", "own_dataset", "arrays of 60 rows"),
        ("model", "pixels", "the module Pixels"),
        ("algorithm", "pull", "the class Pull"),
    ]
    assert told[1]["digest"] == digest_of_module(net())
    assert done.summary["config"]["strategy"]["mu"] == 0.5
    assert done.summary["config"]["model"]["name"] == "pixels"
    data = json.loads((done.folder / "data.json").read_text())
    assert data["files"][0]["what"] == "arrays of 60 rows" and data["splits"]["train"]["read"] == 60
    assert not [path for path in done.folder.rglob("*") if path.suffix in (".pkl", ".pickle")]
    assert "pull on own_dataset with pixels" in (done.folder / "report.html").read_text()


def test_another_process_is_told_what_to_pass_again(done, capsys, tmp_path):
    loaded = fedfrozen.load(done.folder)
    assert loaded.summary["rounds"] == 2  # results need nothing
    with pytest.raises(fedfrozen.UserError) as refused:
        loaded.model()
    again = f"fedfrozen.load('{done.folder}', dataset=..., model=..., algorithm=...).model()."
    assert str(refused.value).endswith(again) and "dataset (arrays of 60 rows, content " in str(refused.value)
    with pytest.raises(fedfrozen.UserError, match=r"fedfrozen.resume\(.*, algorithm="):
        fedfrozen.resume(done.folder, num_rounds=3)
    for words in (["resume", "num_rounds=3"], ["evaluate"], ["export", str(tmp_path / "model")]):
        assert command([words[0], str(done.folder), *words[1:]]) == 2
        assert "with Python objects that this process does not have" in capsys.readouterr().err


def test_what_is_passed_again_must_be_what_it_was(done):
    other = net()
    nn.init.zeros_(other.outer.bias)
    with pytest.raises(fedfrozen.UserError, match="This model is not what the run was made with"):
        fedfrozen.load(done.folder, model=other)
    with pytest.raises(fedfrozen.UserError, match="This dataset is not what the run was made with"):
        fedfrozen.resume(done.folder, num_rounds=3, dataset=(PICTURES[:59], DATA[1][:59]))
    with pytest.raises(fedfrozen.UserError, match="was not given strategy as a Python object"):
        fedfrozen.load(done.folder, strategy=fedfrozen.Strategy)
    with pytest.raises(fedfrozen.UserError, match="num_rounds is no Python object to pass again"):
        fedfrozen.load(done.folder, num_rounds=3)
    model = fedfrozen.load(done.folder, model=net(), dataset=DATA, algorithm=Pull).model()
    assert isinstance(model, Pixels) and not torch.equal(model.outer.weight, net().outer.weight)


def test_a_record_from_elsewhere_is_read_with_care(done, tmp_path):
    (tmp_path / FILE).write_text('{"objects": [{"argument": 3}]}')
    with pytest.raises(fedfrozen.UserError, match="it is not what a run writes"):
        check_given(tmp_path, trains=False)
    told = json.loads((done.folder / FILE).read_text())
    told["objects"][0]["what"] = "\x1b[31m<script>"
    (tmp_path / FILE).write_text(json.dumps(told))
    with pytest.raises(fedfrozen.UserError) as refused:
        check_given(tmp_path, trains=False)
    assert "\x1b" not in str(refused.value)


def test_child_processes_get_the_objects_and_nobody_else(monkeypatch):
    overrides_for("dataset", DATA), overrides_for("model", net())
    overrides_for("algorithm", Pull)
    known = dict(own_objects.KNOWN)
    with handed_down():
        place = Path(os.environ[PLACE])
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        forget(monkeypatch)
        monkeypatch.setenv(DIGEST, "0" * 64)
        with pytest.raises(RunFailed, match="are not as they were handed down"):
            take_over()
        monkeypatch.undo()
        forget(monkeypatch)
        take_over()
        assert known == own_objects.KNOWN
        strategy = next(registry.REGISTERED[key] for key in known if key[0] == "strategies")
        name = strategy.algorithm_for(strategy.Settings())
        assert registry.find("algorithms", name)(mu=0.2).mu == 0.2
        rows = next(registry.REGISTERED[key] for key in known if key[0] == "datasets")
        assert rows.digest == next(one.digest for one in known.values() if one.argument == "dataset")
    assert PLACE not in os.environ and not place.exists()
    forget(monkeypatch)
    monkeypatch.setenv(PLACE, str(place))
    with pytest.raises(RunFailed, match="are not on this machine"):
        take_over()


def test_inputs_and_labels_are_no_sweep():
    assert is_swept("seed", [0, 1]) and is_swept("strategy", ["fedavg", Pull])
    assert not is_swept("dataset", DATA) and not is_swept("dataset", list(DATA))


@pytest.mark.slow
def test_runs_with_the_same_objects_are_one_group(tmp_path):
    words = (*TINY, "strategy=fedavg", "num_rounds=1")
    module = net()
    runs = [
        fedfrozen.run(*words, dataset=DATA, model=module, seed=seed, output_dir=str(tmp_path / str(seed)))
        for seed in (0, 1)
    ]
    pull = fedfrozen.run(
        *TINY, "num_rounds=1", algorithm=Pull, dataset=DATA, model=net(), output_dir=str(tmp_path / "pull")
    )
    found = fedfrozen.compare(*runs, pull)
    assert list(found.table["label"]) == ["fedavg", "pull"]
    assert list(found.table["seeds"].astype(str)) == ["0 1", "0"]
    assert list(found.table["test_baseline"].dropna()) == ["fedavg"]
    nn.init.zeros_(module.outer.weight)  # another content under the same name
    other = fedfrozen.run(*words, dataset=DATA, model=module, output_dir=str(tmp_path / "other"))
    labels = list(fedfrozen.compare(*runs, other).table["label"])
    assert len(labels) == 2 and all(label.startswith("content=") for label in labels)


@pytest.mark.slow
def test_a_run_goes_on_in_another_process(tmp_path, monkeypatch):
    objects = {"algorithm": Pull, "dataset": DATA, "model": net()}
    words = (*TINY, "client.lr_schedule=constant")  # other schedules run over num_rounds
    whole = fedfrozen.run(*words, "num_rounds=4", **objects, output_dir=str(tmp_path / "whole"))
    part = fedfrozen.run(*words, **objects, output_dir=str(tmp_path / "part"))
    forget(monkeypatch)
    resumed = fedfrozen.resume(part.folder, num_rounds=4, **(objects | {"model": net()}))
    assert resumed.metrics["test_loss"].tolist() == whole.metrics["test_loss"].tolist()


@pytest.mark.slow
def test_a_sweep_over_client_classes_is_found_again(tmp_path, monkeypatch):
    class Plain(fedfrozen.Algorithm):
        """As it is."""

    monkeypatch.chdir(tmp_path)
    words = (*TINY, "num_rounds=1")
    sweeps = [
        fedfrozen.sweep(*words, algorithm=[Plain, Pull], dataset=DATA, model=net(), output_dir="both")
        for _ in range(2)
    ]
    assert [run.folder.name for run in sweeps[1].runs] == ["0", "1"]  # the second one kept both
    labels = set(sweeps[1].compare(baseline="strategy=plain").table["label"])
    assert labels == {"plain", "pull"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["privacy=dp_sgd", "privacy.epsilon=8"], ["secure_aggregation=on", "num_clients=3"]],
    ids=["privacy", "masks"],
)
def test_privacy_and_masks_work_on_objects(words, tmp_path):
    run = fedfrozen.run(
        *TINY, *words, algorithm=Pull, dataset=DATA, model=net(), output_dir=str(tmp_path / "out")
    )
    assert run.summary["status"] == "completed"
    assert "epsilon" in run.summary or "secure" in run.rows[-1]


CHILD = """
import sys
from fedfrozen_app.core.own_objects import KNOWN, take_over
from fedfrozen_app.commands.api.calls import run

take_over()
assert len(KNOWN) == 4
run(*sys.argv[1:])
"""


@pytest.mark.slow
def test_a_child_process_trains_by_the_names_alone(done, tmp_path):
    """As those of a Flower simulation do, which get the words of the run and no objects."""
    overrides_for("dataset", DATA), overrides_for("model", net()), overrides_for("algorithm", Pull)
    overrides_for("dataset", (PICTURES[:30], DATA[1][:30]))  # of another run: it stays here
    words = [word for word in shlex.split(done.summary["command"])[1:] if not word.startswith("output_dir=")]
    with handed_down(done.summary["config"]):
        subprocess.run(
            [sys.executable, "-c", CHILD, *words, f"output_dir={tmp_path}/out"], check=True, cwd=tmp_path
        )
    child = fedfrozen.load(tmp_path / "out")
    assert child.metrics["test_loss"].tolist() == done.metrics["test_loss"].tolist()
    assert child.summary["objects"] == done.summary["objects"]


@pytest.mark.slow
def test_a_flower_simulation_gets_the_objects(tmp_path, done):
    run = fedfrozen.run(
        *TINY,
        *("runtime=flower", "strategy.mu=0.5"),
        **{"algorithm": Pull, "dataset": DATA, "model": net(), "output_dir": str(tmp_path / "out")},
    )
    assert run.summary["objects"] == done.summary["objects"]
    assert run.metrics["test_loss"].tolist() == pytest.approx(done.metrics["test_loss"].tolist(), rel=1e-4)
    assert not list(Path(run.folder).rglob("objects"))
