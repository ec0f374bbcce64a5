"""Coded uploads over sites: proposed, checked, stored, and what was not sent is on the site's disk."""

import pytest

from fedfrozen_app.config import compose_run
from fedfrozen_app.exchange.proposal import propose, read_proposal
from fedfrozen_app.exchange.strict import canonical, read_json
from tests.conftest import same_bits

WORDS = ("strategy=fedfrozen", "strategy.warmup_rounds=2", "num_rounds=3", "checkpoint.every=1")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_sites_that_restart_go_on_to_the_bit(sites, codec):
    words = (*WORDS, f"codec={codec}")
    constant = "client.lr_schedule=constant"  # a schedule over fewer rounds would be another
    whole = sites.train(*words, constant, "run_id=whole", folder="whole")
    assert all(row["clients_failed"] == 0 for row in whole.rows[1:])
    sites.train(*words, constant, "run_id=broken", "num_rounds=2", folder="broken")
    resumed = sites.train(*words, constant, "run_id=broken", folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    plain = sites.train(*WORDS, "run_id=plain", folder="plain")
    assert whole.rows[1]["bytes_up"] < 0.25 * plain.rows[1]["bytes_up"]
    assert not same_bits(whole.model, plain.model)


@pytest.mark.slow
def test_sites_decode_broadcasts_and_ask_for_what_they_have_lost(sites):
    """A run that continues goes on to the bit, also where a site has lost its arrays in between: it is sent
    the arrays that the others hold, and no code."""
    words = (*WORDS, "num_rounds=4", "codec.down=int8")
    constant = "client.lr_schedule=constant"
    whole = sites.train(*words, constant, "run_id=whole", folder="whole")
    assert all(row["clients_failed"] == 0 for row in whole.rows[1:])
    first, second = (sum(whole.rows[number]["bytes_down_by_role"].values()) for number in (1, 2))
    assert second < 0.4 * first
    sites.train(*words, constant, "run_id=broken", "num_rounds=2", folder="broken")
    home = sites.folder / "kits" / "north"
    caches = [path for path in home.rglob("*.safetensors") if "cache" in str(path.relative_to(home))]
    assert caches
    for path in caches:
        path.unlink()
    resumed = sites.train(*words, constant, "run_id=broken", folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert resumed.rows[3]["bytes_down"] > whole.rows[3]["bytes_down"]


def test_a_proposal_names_the_codec(sites):
    config = compose_run(sites.words(*WORDS, "codec=int8")).config
    spec = {"classes": ["a", "b"], "mean": [0.5], "std": [0.5]}
    found = propose(config, spec, "run-1", ["query"])
    text = canonical(found.plain)
    assert read_proposal(text).codec.name == "int8"
    down = compose_run(sites.words(*WORDS, "codec.down=int4")).config
    assert read_proposal(canonical(propose(down, spec, "run-1", ["query"]).plain)).codec.down == "int4"
    assert "codec" not in propose(compose_run(sites.words(*WORDS)).config, spec, "run-1", ["query"]).plain
    for key, value in (
        ("block", 3),
        ("name", "none"),
        ("name", "a b"),
        ("more", 1),
        ("share", 2.0),
        ("down", "a b"),
    ):
        hostile = read_json(text, most=10**6, depth=6, longest=300)
        hostile["codec"][key] = value
        with pytest.raises(ValueError, match="codec"):
            read_proposal(canonical(hostile))
