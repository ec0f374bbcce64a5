"""A masked survival study of real sites: keys of their certificates, policies, logs; no Flower processes."""

import json
from dataclasses import replace

import pytest

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.run.take_study import take_study
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.secure.roster import Terms
from fedfrozen_app.server.asking import Asking, Limits
from fedfrozen_app.sites.approval_verbs import pending, show
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.study.masked_steps import edges_text, masked_text, question_text
from fedfrozen_app.study.study_ask import COUNTS, Masks, Step
from tests.sites.inprocess import SiteGrid
from tests.sites.test_survival_study import ASK, EDGES, ask_all, ask_one, prepared, reason, sites

__all__ = ["prepared", "sites"]  # fixtures
MASKED = replace(ASK, masks=Masks(3, 2 / 3, None))
SESSION = "a" * 32


def ask_masked(sites, ask=MASKED, without=()):
    sites.restart()
    grid = SiteGrid({name: one for name, one in sites.executors.items() if name not in without})
    trust = Shown.read(sites.folder / "kits" / "operator" / "ca.crt")
    assert trust.trusted

    def make(ask, question, only=None):
        least = 3 - len(without) if only is None else len(only)
        return Asking(grid, ask, question, Limits(least, 5.0), only=only)

    return take_study(ask, make, sites.folder / "masked", trust)


@pytest.mark.slow
@pytest.mark.parametrize("strata", ["none", "site"])
def test_masked_sums_of_three_sites_are_those_of_open_ones(sites, strata):
    open_study = ask_all(sites, replace(ASK, strata=strata))
    found = ask_masked(sites, replace(MASKED, strata=strata))
    for key in ("all", "groups", "log_rank"):
        assert found[key] == open_study[key]
    for one, other in zip(found["cox"]["covariates"], open_study["cox"]["covariates"], strict=True):
        assert one["coefficient"] == pytest.approx(other["coefficient"], abs=1e-9)
        assert one["error"] == pytest.approx(other["error"], abs=1e-9)
    assert found["masks"]["sites"] == list(sites.names)
    assert all(site["events"] is site["people"] is None for site in found["sites"].values())
    for name in sites.names:
        entries = [
            entry
            for entry in read_audit(sites.kit(name).audit)
            if entry["proposal"] == found["asked"]["hash"]
        ]
        steps = [entry["step"] for entry in entries]
        assert steps[:6] == ["edges", "keys", "shares", "masked counts", "confirm", "unmask"]
        assert steps.count("masked cox") == steps.count("unmask") - 1 == found["masks"]["sums"] - 1
        assert {entry["event"] for entry in entries} == {"survival", "survival_masks"}
        cohort = next(entry["survivors"] for entry in entries if entry["step"] == "confirm")
        assert cohort == sorted(sites.names)


def test_two_sites_are_too_few_for_a_sum(sites):
    with pytest.raises(UserError, match="2 sites would be in the sum, and it must be 3"):
        ask_masked(sites, without=("west",))


@pytest.mark.parametrize(
    ("masks", "policy", "sentence"),
    [
        (Masks(2, 2 / 3, None), {}, "the study has secure_aggregation.min_cohort=2, and it asks for 3"),
        (
            Masks(3, 0.5, None),
            {},
            "the study has secure_aggregation.threshold=0.5, and it asks for 0.66 at least",
        ),
        (Masks(3, 2 / 3, None), {"survival": "none"}, "it takes part in no survival study"),
    ],
)
def test_a_policy_has_floors_for_a_study_s_masks(sites, masks, policy, sentence):
    for name in sites.names:
        sites.change(name, "policy.yaml", **policy)
    with pytest.raises(RunFailed, match="No site answered the study"):
        ask_masked(sites, replace(MASKED, masks=masks))
    assert sentence in reason(sites)


def terms(ask=MASKED, request="b" * 64, **changes):
    given = {"threshold": 2 / 3, "neighbours": None} | changes
    return Terms(SESSION, request, 1, **given)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([Step().text], "the step has other keys than one of a masked study"),  # open counts
        ([question_text(secagg_messages.ask_keys(terms(threshold=0.5)))], "its terms are not those of the"),
        ([question_text(secagg_messages.ask_keys(terms()))] * 2, "the session was begun before"),
        ([masked_text(Step(COUNTS, EDGES[1:]), SESSION, {}, [])], "of a session that it has not begun"),
        (
            [
                question_text(secagg_messages.ask_keys(terms())),
                masked_text(Step(COUNTS, EDGES[1:]), SESSION, {}, []),
            ],
            "the sum is not the one that its keys were signed for",
        ),
        ([masked_text(Step(COUNTS, EDGES[1:-1]), SESSION, {}, [])], "at other times than the study's edges"),
    ],
    ids=["open", "terms", "twice", "no session", "another sum", "edges"],
)
def test_a_server_that_departs_from_the_steps_gets_nothing(sites, steps, sentence):
    for text in steps:
        found = ask_one(sites, MASKED.text, text)
    assert found["state"] == "refused" and not found["json"]
    assert sentence in reason(sites)


def test_edges_say_no_count_and_people_read_what_masks_hide(sites, capsys):
    found = ask_one(sites, MASKED.text, edges_text())
    assert json.loads(found["json"]) == {"floor": 3, "regression": True, "times": list(EDGES[1:])}
    sites.change("north", "policy.yaml", approval="ask")
    sites.restart()
    other = replace(MASKED, id="two")
    assert ask_one(sites, other.text, edges_text())["state"] == "waiting"
    kit = str(sites.kit("north").folder)
    capsys.readouterr()
    pending([kit])
    show([other.hash, kit])
    assert "masks     the server sees sums over 3 sites or more" in capsys.readouterr().out
    assert canonical(json.loads(other.text)) == other.text
