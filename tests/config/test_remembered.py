"""What the other tests compose from memory is what Hydra would compose for them."""

import json

import pytest
from omegaconf import OmegaConf

from fedfrozen_app.config import compose_config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from tests import cached_composition
from tests.conftest import SMALL, slowly

WORDS = ["strategy=fedprox", "partition=iid", "strategy.mu=0.5", "output_dir=a/b-c", "from=null", *SMALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("composed")


@pytest.mark.parametrize(
    "files",
    [
        ["strategy=fedavg", "dataset=text", "adapter=lora"],  # the second sets the model too
        ["model=vit_tiny", "~model.config", "+model.config={}", "+model.config.a.b=1", "model.config.a.b=2"],
        *slowly(
            ["strategy=fedprox", "partition=iid"],
            ["strategy=scaffold", "client=sgd"],  # two that set one section
            ["strategy=fedavg", "strategy=fedfrozen"],
            ["experiment=digits_drift", "strategy=local"],
            ["partition=iid"],
            ["strategy=schedule", "strategy.stages=[{from:1,freeze:[head]}]", "output_dir='a, b'"],
            ["hydra.run.dir=a/b", "strategy=fedprox", "hydra.mode=RUN"],
            ["hydra.job.chdir=true"],  # Hydra's own settings are left to it
            [],
        ),
    ],
    ids=" ".join,
)
def test_files_from_memory_and_then_values_give_what_hydra_gives(files, folder, monkeypatch):
    words = ["output_dir=a/b-c", "from=null", *SMALL, *files]
    plain = OmegaConf.to_container(compose_config(words, hydra=True))
    with cached_composition.remembered(folder):
        other = compose_config(["seed=3", *words])  # of the same files
        monkeypatch.setattr(cached_composition, "_KNOWN", {})  # as another process
        again = OmegaConf.to_container(compose_config(words, hydra=True))
    assert other.seed == 3
    assert again == plain and json.dumps(again, default=str) == json.dumps(
        plain, default=str
    )  # in the same order too


@pytest.mark.parametrize(
    ("files", "again"), [(["strategy=fedprox"], 0), (["client=sgd", "model=linear"], 0), ([], 1)], ids=str
)
def test_only_what_names_a_new_thing_is_left_to_hydra(files, again, folder, monkeypatch):
    """A class that is registered has no file: what its name stands for is never remembered."""
    asked = []

    def plain(self, config_name, overrides, *args, **keys):
        asked.append(overrides)
        return hydras_own(self, config_name, overrides, *args, **keys)

    hydras_own = cached_composition._PLAIN
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "mine"), registry.find("strategies", "fedavg"))
    with cached_composition.remembered(folder):
        compose_config(files or ["strategy=mine"])
        monkeypatch.setattr(cached_composition, "_PLAIN", plain)
        compose_config([*(files or ["strategy=mine"]), "seed=5", "+model.config.a=1"])
    assert len(asked) == again


@pytest.mark.parametrize(
    "word",
    [
        "num_rounds=3,4",
        "strategy=fedfrozn",
        "client.nothing=1",
        "strategy.warmup_rounds=2",
        "seed =1",
        "strategy=null",
        "+client.lr=1",
    ],
)
def test_a_refusal_is_the_same(word, folder):
    with pytest.raises(UserError) as plain:
        compose_config([*WORDS, word])
    with cached_composition.remembered(folder), pytest.raises(UserError) as again:
        compose_config([*WORDS, word])
    assert str(again.value) == str(plain.value)
