"""A site counts attempts at masked rounds, shows its steward what the masks bear, and knows older masks."""

import json
from dataclasses import replace

import pytest

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import FORMAT, MASKED_FORMAT, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.sites import approval_verbs
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request_handler import RequestHandler
from fedfrozen_app.sites.store import continues
from tests.secure.attacks import ROUND, Hostile, attack, log
from tests.secure.runs import ON
from tests.sites.test_hostile import proposed


def asks_often(count, change=lambda terms: terms):
    """A server that asks north for keys so many times before it begins a round."""
    asked = []

    def tampers(grid, step, site, text):
        if step == "keys" and site == "north" and not asked:
            about = next(e for e in read_audit(grid.executors[0].kit.audit) if e["event"] == "hello")
            ticket = {key: about[key] for key in ("run", "proposal")}
            terms = secagg_messages.read_terms(json.loads(text)["terms"])
            for number in range(count):
                own = change(replace(terms, session=f"{number:032x}"))
                asked.append(Hostile.again(grid, "north", secagg_messages.ask_keys(own), ticket))
        return text

    return tampers


def test_a_round_is_begun_four_times_at_most_and_each_is_on_record(sites):
    """Each attempt is a draw of neighbours, which might suit colluders. A restart forgets nothing."""
    reasons, _, _ = attack(sites, asks_often(4))
    keys = [entry for entry in log(sites) if entry["event"] == "keys"]
    assert len({entry["session"] for entry in keys}) == 4 and {entry["round"] for entry in keys} == {1}
    assert reasons["north"] == ["round 1 was begun 4 times, and that is all it gives"]
    assert "roster" not in [entry["event"] for entry in log(sites)]
    audit = RequestHandler(sites.kit("north")).site.audit
    assert audit.attempts("test", 1) == 4 and audit.attempts("test", 2) == 0


@pytest.mark.slow
def test_the_day_s_attempts_and_the_run_s_rounds_are_limited(sites):
    sites.change("north", "policy.yaml", rounds_per_day=1)
    attack(sites, asks_often(3))
    assert [e["event"] for e in log(sites)].count("keys") == 2  # the third is not even written down
    sites.change("north", "policy.yaml", rounds_per_day=100)
    reasons, _, _ = attack(
        sites, asks_often(1, lambda t: replace(t, round=2)), *ROUND, "run_id=b", fails=False
    )
    assert reasons["north"] == ["the masks are for round 2 of 1"]


def test_keys_of_a_round_serve_no_other(sites):
    """A server that begins a round under another number, to get around the count."""

    def tampers(grid, step, site, text):
        if step == "keys":
            found = json.loads(text)
            found["terms"]["round"] = 1
            return canonical(found)
        return text

    words = (ON, "num_rounds=2", "strategy.warmup_rounds=1")
    reasons, events, _ = attack(sites, tampers, *words, fails=False)
    assert events.count("sent") == 3 and events.count("unmasked") == 3  # of the first round
    assert all(reasons[name] for name in sites.names)


# What the steward sees ------------------------------------------------------------------------------------


@pytest.fixture
def asked(sites):
    """A masked run that north's people were asked for, and its proposal."""
    kit, proposal = sites.kit("north"), read_proposal(canonical(proposed(*ROUND)))
    Approvals(kit.approvals).ask(proposal)
    return kit, proposal


def test_the_steward_sees_what_the_masks_bear(sites, asked, capsys):
    kit, proposal = asked
    folder = str(kit.folder)
    approval_verbs.pending([folder])
    assert "masks (min_cohort 3, threshold 0.67, neighbours 160)" in capsys.readouterr().out
    approval_verbs.show([proposal.hash, folder])
    shown = capsys.readouterr().out
    assert "of a round's sites 0.67 must stay to its end" in shown
    assert "all others of a round, or with 160 that it draws" in shown and "REFUSES" not in shown
    sites.change("north", "policy.yaml", min_threshold=0.9)  # after it was asked
    approval_verbs.approve([proposal.hash, folder])
    assert "THE POLICY REFUSES THEM: the run has secure_aggregation.threshold" in capsys.readouterr().out
    sites.change("north", "policy.yaml", min_threshold=66)
    with pytest.raises(UserError, match="min_threshold is a share of a round's sites: give a number up to 1"):
        sites.restart()


def test_masks_of_an_older_version_are_refused_in_a_sentence(sites, asked):
    """And an older site refuses these: it knows one format. Private arrays outlive the update."""
    kit, proposal = asked
    assert (proposal.format, FORMAT, MASKED_FORMAT) == (2, 1, 2)
    older = read_proposal(canonical(proposal.plain | {"format": 1}))
    assert older.hash != proposal.hash
    assert "masks as an older version of this package does" in Policy.read(kit.policy).problem_of_masks(older)
    assert continues(proposal, older) and not continues(older, proposal)
    plain = {key: value for key, value in proposal.plain.items() if key != "secure_aggregation"}
    assert Policy.read(kit.policy).problem_of_masks(read_proposal(canonical(plain | {"format": 1}))) is None
    with pytest.raises(ValueError, match="its format is that of a run with masks, and it has none"):
        read_proposal(canonical(plain))
