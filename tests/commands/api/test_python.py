"""`import fedfrozen`: the same runs as the command's, as objects; own data, models and methods as well."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedfrozen
from fedfrozen_app.commands.api.calls import plain, spelled, swept
from fedfrozen_app.commands.api.own import overrides_for
from fedfrozen_app.core import own_objects, registry

TINY = ("num_rounds=2", "num_clients=2", "dataset.limit=80", "track.tensorboard=false", "runtime.threads=1")
SMALL = ("model.config.hidden_size=8", "model.config.intermediate_size=8", "model.config.num_hidden_layers=1")


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    monkeypatch.setattr(own_objects, "KNOWN", dict(own_objects.KNOWN))
    monkeypatch.setattr(own_objects, "NAMES", dict(own_objects.NAMES))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    words = ("strategy=fedfrozen", "strategy.warmup_rounds=1", *TINY, *SMALL)
    return fedfrozen.run(*words, output_dir=str(folder), seed=3)


def test_a_run_is_an_object_over_its_files(done):
    assert done.summary["config"]["seed"] == 3
    assert list(done.metrics.index) == [0, 1, 2]
    assert done.metrics.loc[2, "test_accuracy"] == done.summary["final_test_accuracy"]
    assert "seconds.total" in done.metrics and list(done.metrics["stage"][1:]) == ["warmup", "frozen"]
    assert isinstance(done.clients, pd.DataFrame) and done.clients.index.names == ["round", "client"]
    assert set(done.clients.index.get_level_values("client")) == {"0", "1"}
    assert "final_test_accuracy=" in repr(done)


def test_the_model_is_the_runs_and_a_transformers_model(done):
    model = done.model()
    assert type(model).__name__ == "ViTForImageClassification"
    assert model.config.id2label[3] == "3"
    from safetensors.torch import load_file

    kept = load_file(done.folder / "model.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in model.named_parameters())


def test_it_shows_itself(done):
    figure = done.plot()
    assert len(figure.axes) == 4
    page = done._repr_html_()
    assert page.startswith('<iframe srcdoc="') and "&lt;script" in page and "<script" not in page


def test_a_folder_is_loaded_again(done):
    again = fedfrozen.load(done.folder)
    assert again.summary == done.summary
    with pytest.raises(fedfrozen.UserError, match="There is no run folder nowhere: give the folder that"):
        fedfrozen.load("nowhere")
    with pytest.raises(fedfrozen.UserError, match="holds no run"):
        fedfrozen.load(done.folder / "checkpoints" / "2")


def test_a_comparison_prints_as_tables_that_a_reader_can_read(done):
    said = repr(fedfrozen.compare(done))
    assert "fedfrozen" in said and "bytes up" in said and "columns]" not in said
    assert max(map(len, said.splitlines())) <= 110


def test_mistakes_are_exceptions_with_the_commands_sentences(done):
    with pytest.raises(fedfrozen.UserError, match=r"There is no key 'num_round' .* did you mean num_rounds"):
        fedfrozen.run(num_round=5)
    with pytest.raises(fedfrozen.UserError, match=r"strategy\.warmup_rounds=60 must lie between 0 and"):
        fedfrozen.run("strategy.warmup_rounds=60")
    with pytest.raises(fedfrozen.UserError, match="holds a run"):
        fedfrozen.run(*TINY, output_dir=str(done.folder))
    with pytest.raises(fedfrozen.UserError, match="strategy=int cannot be used: give the name of one"):
        fedfrozen.run(strategy=3)
    with pytest.raises(AttributeError, match="it offers Algorithm, Comparison"):
        _ = fedfrozen.rum


@dataclass(frozen=True)
class Settings(fedfrozen.Strategy.Settings):
    first: int = fedfrozen.setting(1, "Rounds in which everything trains", least=0)


class HeadLater(fedfrozen.Strategy):
    """Everything for some rounds, then the head alone."""

    Settings = Settings

    def plan(self, server_round):
        plan = super().plan(server_round)
        if server_round <= self.settings.first:
            return plan
        return plan.freeze(name for name in plan.trained if self.federation.roles[name].kind != "head")


def test_a_strategy_class_is_a_strategy(tmp_path):
    run = fedfrozen.run(
        *TINY, *SMALL, "strategy.first=1", strategy=HeadLater, output_dir=str(tmp_path / "out")
    )
    (told,) = run.summary["objects"]
    assert (told["argument"], told["word"], told["what"]) == ("strategy", "head_later", "the class HeadLater")
    name = f"head_later_{told['digest'][:8]}"
    assert run.summary["config"]["strategy"] == {"name": name, "first": 1}
    assert json.loads((run.folder / "objects.json").read_text())["objects"] == [told]
    assert "head_later on digits" in (run.folder / "report.html").read_text()
    sent = run.metrics["trained_params"]
    assert sent[2] < sent[1]
    head = 8 * 10 + 10
    assert sent[2] == head
    with pytest.raises(fedfrozen.UserError, match=r"strategy\.first=-1 is out of range"):
        fedfrozen.run(*TINY, "strategy.first=-1", strategy=HeadLater)


class Pixels(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 4), nn.Linear(4, classes)
        self.roles = {name: "head" if "outer" in name else ("mlp", 0) for name, _ in self.named_parameters()}

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.outer(self.inner(pixel_values.flatten(1)).tanh()))


@pytest.mark.slow
def test_a_module_and_a_dataset_of_pictures_are_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (8, 8), dtype=np.uint8) for _ in range(60)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["up", "down", "left"])}
    )
    data = datasets.Dataset.from_dict({"image": pictures, "label": [n % 3 for n in range(60)]}, features)
    module = Pixels(3)
    before = module.outer.weight.detach().clone()
    settings = {"strategy": "fedavg", "dataset": data, "model": module}
    run = fedfrozen.run(*TINY, "partition=iid", **settings, output_dir=str(tmp_path / "out"))
    assert torch.equal(module.outer.weight, before)  # ours is a copy
    trained = run.model()
    assert isinstance(trained, Pixels) and not torch.equal(trained.outer.weight, before)
    assert run.summary["config"]["dataset"]["name"] == "own_dataset"


@pytest.mark.slow
def test_texts_of_ones_own_bring_a_model_that_reads_them(tmp_path):
    texts = {"text": ["good day", "bad night"] * 20, "label": ["a", "b"] * 20}
    data = datasets.DatasetDict({"train": datasets.Dataset.from_dict(texts)})
    data["test"] = data["train"].select(range(6))
    words = (*TINY, "strategy=fedavg", "partition=iid", "num_rounds=1")
    run = fedfrozen.run(*words, dataset=data, output_dir=str(tmp_path / "out"))
    assert run.summary["config"]["model"]["name"] == "bert_small"
    assert type(run.model()).__name__ == "BertForSequenceClassification"


@pytest.mark.slow
def test_a_sweep_with_a_class_in_it_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = list(sys.argv)
    done = fedfrozen.sweep(*TINY, *SMALL, strategy=["fedavg", HeadLater], seed=[0, 1], output_dir="both")
    assert sys.argv == words
    assert len(done.runs) == 4
    found = done.compare(baseline="strategy=fedavg")
    assert set(found.table["label"]) == {"fedavg", "head_later"}
    assert list(done.compare(baseline="strategy=head_later").table["test_baseline"].dropna()) == [
        "head_later"
    ]
    assert len(found.runs) == 4 and found.notes
    assert found._repr_html_().startswith("<iframe")
    assert len(fedfrozen.load("both").runs) == 4
    assert len(fedfrozen.compare(*done.runs).runs) == 4


def test_how_python_values_are_spelled():
    assert spelled("seed", 3) == ["seed=3"]
    assert spelled("overwrite", True) == ["overwrite=true"]
    assert spelled("output_dir", "a b") == ["output_dir='a b'"]
    assert spelled("client", "sgd") == ["client=sgd"]
    assert spelled("client", {"lr": 0.1}) == ["client.lr=0.1"]
    assert spelled("checkpoint", {"every": 0, "keep": 1}) == ["checkpoint.every=0", "checkpoint.keep=1"]
    assert swept("seed", range(3)) == ["seed=0,1,2"]
    assert spelled("model", {"config": {"hidden_size": 8}}) == ["model.config.hidden_size=8"]
    assert spelled("dataset", {"path": "a", "unit_column": "b"}) == [
        "dataset.path='a'",
        "dataset.unit_column='b'",
    ]
    assert plain([1, None, "a"]) == "[1,null,a]"


def test_a_name_is_the_content_so_that_equal_objects_make_equal_runs():
    torch.manual_seed(0)
    net = Pixels(3)
    (_, source, name) = overrides_for("model", net)
    assert name == "model.name=pixels" and source.startswith("model.source=pixels_")
    assert (
        overrides_for("model", net)
        == overrides_for("model", copy.deepcopy(net))
        == [*("model=linear", source, name)]
    )
    with torch.no_grad():
        net.outer.bias[0] += 1
    assert overrides_for("model", net)[1] != source
    frame = pd.DataFrame({"text": ["a", "b"], "label": ["x", "y"]})
    words = overrides_for("dataset", frame)
    assert words == overrides_for("dataset", datasets.Dataset.from_pandas(frame))
    frame.loc[0, "text"] = "changed in place"
    assert overrides_for("dataset", frame) != words


def test_what_cannot_be_used_gets_one_sentence():
    class Sends(fedfrozen.Algorithm):
        to_server = ("dc",)

    @dataclass(frozen=True)
    class Open(fedfrozen.Algorithm):
        mu: float

    class Undecorated(fedfrozen.Algorithm):
        mu: float = 0.1

    class Wrong(fedfrozen.Strategy):
        algorithm = Pixels

    refused = [
        ({"strategy": 3}, "strategy=int cannot be used: give the name of one, or a class derived from"),
        ({"strategy": Pixels}, "strategy=the class Pixels cannot be used"),
        ({"model": Pixels}, "model=the class Pixels cannot be used: give the name of one, or an nn.Module"),
        ({"dataset": 3}, "dataset=int cannot be used: give the name of one, or a pandas DataFrame"),
        ({"dataset": np.zeros((3, 4, 4))}, "one ndarray has no labels"),
        ({"algorithm": "fedprox"}, "algorithm=fedprox: name a strategy instead"),
        ({"algorithm": Open(1.0)}, r"algorithm=Open\(...\) is an object: give the class, without brackets"),
        ({"algorithm": Open}, "Open.mu has no default: give it one"),
        ({"algorithm": Undecorated}, "Undecorated declares mu but is no dataclass"),
        ({"algorithm": Sends}, "Sends exchanges dc with the server: give a strategy whose `step` uses it"),
        ({"algorithm": Sends, "strategy": "fedavg"}, "leave strategy out"),
        ({"strategy": Wrong}, "Wrong.algorithm is the class Pixels: give a class derived from"),
    ]
    for keys, sentence in refused:
        with pytest.raises(fedfrozen.UserError, match=sentence):
            fedfrozen.run(*TINY, **keys)
    with pytest.raises(fedfrozen.UserError, match="runtime=deployed cannot use strategy"):
        fedfrozen.run(*TINY, "runtime=deployed", strategy=HeadLater)


def test_the_import_alone_is_light():
    code = "import sys, fedfrozen; dir(fedfrozen); print(*({'torch', 'flwr', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
