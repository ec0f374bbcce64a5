"""What the other tests compose from memory is what Hydra would compose for them."""

import json

import pytest
from omegaconf import OmegaConf

from fedfrozen_app.config import compose_config
from fedfrozen_app.errors import UserError
from tests import composed_once
from tests.conftest import SMALL

WORDS = ["strategy=fedprox", "partition=iid", "strategy.mu=0.5", "output_dir=a/b-c", "from=null", *SMALL]


@pytest.mark.parametrize(
    "files",
    [
        ["strategy=fedprox", "partition=iid"],
        ["strategy=fedavg", "dataset=text", "adapter=lora"],  # the second sets the model too
        ["strategy=scaffold", "client=sgd"],  # two that set one section
        ["strategy=fedavg", "strategy=fedfrozen"],
        ["experiment=digits_drift", "strategy=local"],
        ["partition=iid"],
        [],
    ],
    ids=" ".join,
)
def test_files_from_memory_and_then_values_give_what_hydra_gives(files):
    words = [*files, "output_dir=a/b-c", "from=null", *SMALL]
    plain = OmegaConf.to_container(compose_config(words, hydra=True))
    with composed_once.remembered():
        other = compose_config(["seed=3", *words])  # of the same files
        again = OmegaConf.to_container(compose_config(words, hydra=True))
    assert other.seed == 3
    for found in (plain, again):
        del found["hydra"]["job"]["override_dirname"]  # names no folder of ours
    assert again == plain and json.dumps(again) == json.dumps(plain)  # in the same order too


@pytest.mark.parametrize(
    "word", ["num_rounds=3,4", "strategy=fedfrozn", "client.nothing=1", "strategy.warmup_rounds=2"]
)
def test_a_refusal_is_the_same(word):
    with pytest.raises(UserError) as plain:
        compose_config([*WORDS, word])
    with composed_once.remembered(), pytest.raises(UserError) as again:
        compose_config([*WORDS, word])
    assert str(again.value) == str(plain.value)
