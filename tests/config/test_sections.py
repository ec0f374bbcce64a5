"""A configuration is read section by section; all at once it would be the same."""

import re

import pytest
from omegaconf import OmegaConf

from fedfrozen_app.config import Config, compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from tests.conftest import slowly


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=fedavg", "adapter=lora", "+adapter.ranks.0=1", "client.clip=1", "seed=3"],
        *slowly(
            [],
            ["strategy=schedule", "strategy.stages=[{from:1},{from:2,freeze:[head]}]", "run_id=a"],
            ["strategy=pfeddc", "~model.config", "+model.config={}", "+model.config.a.b=[1,2.5,null,yes]"],
            ["privacy=dp_sgd", "strategy=fedavg", "server_optimizer=adam", "participation=1"],
        ),
    ],
    ids=" ".join,
)
def test_section_by_section_it_is_what_it_is_at_once(words):
    plain = resolved(compose_config(words))
    by_section = read(plain)
    plain["start_from"] = plain.pop("from")
    assert repr(by_section) == repr(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain)))


def test_nobody_s_change_of_a_section_is_in_the_next_one_s():
    plain = resolved(compose_config([]))
    read(plain).client.lr = 7.0
    read(plain).strategy["name"] = "other"
    assert read(plain).client.lr != 7.0 and read(plain).strategy["name"] == "fedfrozen"


@pytest.mark.parametrize(
    ("section", "key", "value", "wrong"),
    [
        ("client", "lr", "much", "client.lr: Value 'much' of type 'str' could not be converted to Float."),
        (None, "seed", "one", "seed: Value 'one' of type 'str' could not be converted to Integer."),
        ("client", "rate", 1, "There is no key 'client.rate' in this configuration: did you mean"),
        (None, "sed", 1, "There is no key 'sed' in this configuration: did you mean seed?"),
        ("model", "name", "???", "model.name is not set: add model.name=VALUE to the command."),
        (None, "early_stop", 5, "early_stop has keys of its own: set one of them, such as early_stop.pat"),
        (None, "early_stop", None, "early_stop has keys of its own: set one of them, such as early_stop.pat"),
    ],
)
def test_what_is_wrong_is_told_with_its_whole_key(section, key, value, wrong):
    plain = resolved(compose_config([]))
    (plain[section] if section else plain)[key] = value
    with pytest.raises(UserError, match=re.escape(wrong)):
        read(plain)


def test_a_section_that_an_older_run_did_not_have_is_the_usual_one():
    plain = resolved(compose_config([]))
    early_stop = plain.pop("early_stop")
    assert vars(read(plain).early_stop) == early_stop
