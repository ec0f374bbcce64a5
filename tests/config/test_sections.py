"""A configuration is read section by section; all at once it would be the same."""

import pytest

from fedfrozen_app.config import checks, compose_config, read, resolved
from fedfrozen_app.errors import UserError


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["strategy=schedule", "strategy.stages=[{from:1},{from:2,freeze:[head]}]", "run_id=a"],
        ["strategy=fedavg", "adapter=lora", "+adapter.ranks.0=1", "client.clip=1", "seed=3"],
        ["strategy=pfeddc", "~model.config", "+model.config={}", "+model.config.a.b=[1,2.5,null,yes]"],
        ["privacy=dp_sgd", "strategy=fedavg", "server_optimizer=adam", "participation=1"],
    ],
    ids=" ".join,
)
def test_section_by_section_it_is_what_it_is_at_once(words):
    plain = resolved(compose_config(words))
    plain["start_from"] = plain.pop("from")
    assert repr(checks._by_section(plain)) == repr(checks._in_one_piece(plain))


def test_nobody_s_change_of_a_section_is_in_the_next_one_s():
    plain = resolved(compose_config([]))
    read(plain).client.lr = 7.0
    read(plain).strategy["name"] = "other"
    assert read(plain).client.lr != 7.0 and read(plain).strategy["name"] == "fedfrozen"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("client", "lr", "much"),
        (None, "seed", "one"),
        ("client", "rate", 1),
        (None, "sed", 1),
        ("model", "name", "???"),
    ],
)
def test_what_is_wrong_is_said_as_it_would_be_at_once(section, key, value):
    plain = resolved(compose_config([]))
    (plain[section] if section else plain)[key] = value
    with pytest.raises(UserError, match=key) as found:
        read(plain)
    plain["start_from"] = plain.pop("from")
    with pytest.raises(UserError) as at_once:
        checks._in_one_piece(plain)
    assert str(found.value) == str(at_once.value)


def test_a_section_that_an_older_run_did_not_have_is_the_usual_one():
    plain = resolved(compose_config([]))
    early_stop = plain.pop("early_stop")
    assert vars(read(plain).early_stop) == early_stop
