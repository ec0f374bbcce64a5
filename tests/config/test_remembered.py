"""What the other tests compose from memory is what Hydra would compose for them."""

import pytest
from omegaconf import OmegaConf

from fedfrozen_app.config import compose_config
from fedfrozen_app.errors import UserError
from tests import composed_once
from tests.conftest import SMALL

WORDS = ["strategy=fedprox", "partition=iid", "strategy.mu=0.5", "output_dir=a/b-c", "from=null", *SMALL]


def test_files_from_memory_and_then_values_give_what_hydra_gives():
    plain = OmegaConf.to_container(compose_config(WORDS, hydra=True))
    with composed_once.remembered():
        other = compose_config(["seed=3", *WORDS])  # of the same files
        again = OmegaConf.to_container(compose_config(WORDS, hydra=True))
    assert other.seed == 3
    for found in (plain, again):
        del found["hydra"]["job"]["override_dirname"]  # names no folder of ours
    assert again == plain


@pytest.mark.parametrize(
    "word", ["num_rounds=3,4", "strategy=fedfrozn", "client.nothing=1", "strategy.warmup_rounds=2"]
)
def test_a_refusal_is_the_same(word):
    with pytest.raises(UserError) as plain:
        compose_config([*WORDS, word])
    with composed_once.remembered(), pytest.raises(UserError) as again:
        compose_config([*WORDS, word])
    assert str(again.value) == str(plain.value)
