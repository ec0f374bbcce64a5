"""A model, a data set: found by name, built in or from another package, and imported only when asked for."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources import DatasetSpec, load, needs_path
from fedfrozen_app.data.sources.raw_rows import Found, Rows, reads
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.models.build import build_model, outline_model
from fedfrozen_app.models.roles import roles_of

SHAPE = InputShape("image", ("a", "b"), channels=1, image_size=8)


class TwoLayers(nn.Module):
    """Another package's model: no class of transformers, and it names the roles of its parameters itself."""

    def __init__(self, width, shape, labels=None):
        super().__init__()
        self.inner = nn.Linear(shape.channels * shape.image_size**2, width)
        self.outer = nn.Linear(width, len(shape.classes) if labels is None else labels)
        self.roles = {
            "inner.weight": ("mlp", 0),
            "inner.bias": Role("mlp", 0),
            "outer.weight": "head",
            "outer.bias": "head",
        }

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.outer(self.inner(pixel_values.flatten(1)).tanh()))


def build(spec):
    return TwoLayers(spec.config.get("width", 4), spec.shape, spec.config.get("labels"))


def without_answer(spec):
    model = TwoLayers(4, spec.shape)
    model.forward = lambda pixel_values: None
    return model


def no_role(spec):
    model = build(spec)
    del model.roles["outer.bias"]
    return model


def odd_role(spec):
    model = build(spec)
    model.roles["outer.bias"] = "decoder"
    return model


def statistics(spec):
    model = build(spec)
    model.register_buffer("mean", torch.zeros(1))
    return model


@reads("classification", "multilabel", path=False)
def stripes(spec):
    """Pictures of one bright column."""
    pictures = [torch.zeros(8, 8, dtype=torch.uint8).numpy() for _ in range(80)]
    for number, picture in enumerate(pictures):
        picture[:, number % 2] = 255
    labels = [("left", "right")[number % 2] for number in range(80)]
    return Found("image", Rows(pictures, labels, {}, [f"stripe {n}" for n in range(80)]), None)


def from_path(spec):
    return stripes(spec)


@pytest.fixture
def installed(monkeypatch):
    """Offers objects of this file as an installed package would."""

    def offer(group, **objects):
        found = [SimpleNamespace(name=n, value=f"{__name__}:{o.__name__}") for n, o in objects.items()]

        wanted = f"fedfrozen.{group}"
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == wanted else [])
        registry.places.cache_clear()

    yield offer
    monkeypatch.undo()
    registry.places.cache_clear()


def make(source, **config):
    settings = {"source": source, "path": None, "model_type": None, "config": config, "shape": SHAPE}
    return build_model(**settings, dtype="float32", seed=3)


def test_a_model_from_another_package_is_built_as_ours_are(installed):
    installed("models", two_layers=build)
    before = torch.get_rng_state()
    one, two = make("two_layers", width=5), make("two_layers", width=5)
    assert torch.equal(before, torch.get_rng_state())
    assert not one.training and one.inner.out_features == 5
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert roles_of(one)["inner.weight"] == roles_of(one)["inner.bias"] == Role("mlp", 0)
    settings = {"source": "two_layers", "path": None, "model_type": None, "config": {}, "shape": SHAPE}
    outline = outline_model(**settings, dtype="bfloat16")
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in outline.parameters())


def test_it_trains_and_is_planned(installed, train):
    installed("models", two_layers=build)
    words = ["strategy=fedavg", "model=linear", "model.source=two_layers", "+model.config.width=6"]
    words += ["num_clients=3", "num_rounds=2", "dataset.limit=160", "partition.min_size=8"]
    words += ["client.lr=0.01", "runtime.threads=1", "runtime.runner=sequential"]
    rows = train(*words, small=False).rows
    assert rows[1]["bytes_up_by_role"] == {"mlp": 3 * 4 * 65 * 6, "head": 3 * 4 * 7 * 10}
    assert rows[-1]["test_loss"] < rows[0]["test_loss"] and rows[-1]["clients_failed"] == 0
    planned = forecast(read(resolved(compose_config(words))))
    assert [dict(part) for part in planned.up_by_round] == [row["bytes_up_by_role"] for row in rows[1:]]


def test_a_model_that_does_not_fit_is_one_sentence(installed):
    fakes = {"two_layers": build, "silent": without_answer, "no_role": no_role, "odd_role": odd_role}
    installed("models", **fakes, statistics=statistics)
    with pytest.raises(UserError, match=r"'TwoLayers' is no classifier of these data.*each of the 2 classes"):
        make("two_layers", labels=3)
    with pytest.raises(UserError, match="'TwoLayers' is no classifier of these data"):
        make("silent")
    with pytest.raises(UserError, match=r"names no role for its parameter 'outer\.bias'"):
        roles_of(make("no_role"))
    with pytest.raises(UserError, match=r"calls its parameter 'outer\.bias' a 'decoder', which is no role"):
        roles_of(make("odd_role"))
    with pytest.raises(UserError, match="running statistic"):
        roles_of(make("statistics"))


def test_a_data_set_from_another_package_is_read_as_ours_are(installed, train):
    installed("datasets", stripes=stripes, filed=from_path)
    corpus = load(DatasetSpec(name="stripes", kind="stripes"))
    assert corpus.classes == ("left", "right") and len(corpus.train) + len(corpus.test) == 80
    assert not needs_path("stripes") and needs_path("filed") and not needs_path("digits")
    with pytest.raises(UserError, match=r"dataset\.path is missing"):
        load(DatasetSpec(kind="filed"))
    with pytest.raises(UserError, match=r"task=entities does not fit .*: use classification or multilabel\."):
        load(DatasetSpec(kind="stripes", task="entities"))
    with pytest.raises(UserError, match="task=multilabel does not fit"):
        load(DatasetSpec(kind="filed", path="here", task="multilabel"))
    run = train("dataset.name=stripes", "dataset.kind=stripes", "strategy=fedavg", "num_rounds=1")
    assert run.rows[-1]["clients_failed"] == 0


def test_unknown_names_say_what_is_near(installed):
    installed("models", two_layers=build)
    with pytest.raises(UserError, match=r"Unknown model\.source 'two_layer': did you mean two_layers\?"):
        make("two_layer")
    with pytest.raises(UserError, match=r"Unknown dataset\.kind 'digitz': did you mean digits\?"):
        load(DatasetSpec(kind="digitz"))
    with pytest.raises(UserError, match=r"choose one of config, .*, moderate_cnn, two_layers\.$"):
        make("qqq")


def test_a_package_replaces_nothing_that_is_built_in(installed):
    installed("models", config=build)
    assert registry.places("models")["config"] == registry.BUILT_IN["models"]["config"]
    with pytest.raises(UserError, match="no classifier by themselves"):
        make("aligned")


def test_every_name_leads_somewhere():
    for group, table in registry.BUILT_IN.items():
        assert all(registry.find(group, name) is not None for name in table)


@pytest.mark.slow
def test_one_reader_is_imported_not_all():
    code = (
        "import sys; from fedfrozen_app.data.sources import DatasetSpec, load; load(DatasetSpec()); "
        "print(*(name for name in sys.modules if name.startswith('fedfrozen_app.data.sources.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read_by = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert "digits" in read_by and not {"mimic", "brat", "i2b2", "conll", "tables"} & read_by
