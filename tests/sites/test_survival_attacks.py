"""A hostile server in a survival study: the difference of two answers is not about a few people."""

import json

import numpy as np
import pandas
import pytest

from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.study.study_ask import StudyAsk
from fedfrozen_app.survival.people import Columns
from tests.sites.test_survival_study import (
    ASK,
    COLUMNS,
    EDGES,
    VIEW,
    ask_one,
    people,
    prepared,
    reason,
    sites,
    step,
)

__all__ = ["prepared", "sites"]  # fixtures
AGE = 60.0  # the centre of `step`


def table(sites, frame: pandas.DataFrame, file: str = "people.csv") -> None:
    frame.to_csv(sites.folder / "kits" / "north" / file, index=False)


def leaving(found: dict) -> np.ndarray:
    """(times, 6): sums of 1, x, x·x over those who leave at each time."""
    return np.array(json.loads(found["json"])["leaving"])


def with_one_between(low: float, high: float) -> tuple[pandas.DataFrame, pandas.Series]:
    """The site's table in which one person alone is followed until some time in (low, high]."""
    frame = people(0).reset_index(drop=True)
    within = np.flatnonzero((frame["days"] > low) & (frame["days"] <= high))
    frame.loc[within[1:], "days"] = low / 2
    return frame, frame.loc[within[0]]


def test_two_choices_of_times_do_not_set_one_person_apart(sites):
    """Sums up to 40 and up to 90 are each over many people; their difference is over those in between."""
    frame, victim = with_one_between(40, 90)
    table(sites, frame)
    answers = [ask_one(sites, ASK.text, step(times=times)) for times in ((40.0, 200.0), (90.0, 200.0))]
    given = [leaving(found)[0] for found in answers if found["state"] == ""]
    if len(given) == 2:
        people_, age = (given[1] - given[0])[:2]
        assert not (people_ == pytest.approx(1) and age == pytest.approx((victim["age"] - AGE) / 10))
    assert len(given) < 2
    assert any(
        "other times than" in entry.get("reason", "") for entry in read_audit(sites.kit("north").audit)
    )


def test_times_that_the_counts_show_are_answered(sites):
    """Each of them alone and all together: unions of the same intervals."""
    shown = json.loads(ask_one(sites, ASK.text)["json"])["tables"][0]["events"]["times"]
    assert shown == list(EDGES[1:])
    for times in (shown, shown[1:], shown[-1:], shown[:1]):
        assert ask_one(sites, ASK.text, step(times=tuple(times)))["state"] == ""


def test_two_views_that_differ_in_one_person_are_not_both_answered(sites):
    """As in a census: the difference of the two answers would be that person's."""
    frame = people(0)
    table(sites, frame.iloc[1:], "fewer.csv")
    sites.change("north", "site.yaml", views={"main": VIEW, "fewer": VIEW | {"path": "fewer.csv"}})
    sites.restart()
    main, fewer = (canonical(ASK.plain | {"view": view}) for view in ("main", "fewer"))
    assert ask_one(sites, main)["state"] == ""
    assert ask_one(sites, fewer)["state"] == "refused"
    assert "fewer than 3 differ from those of the view main" in reason(sites)
    assert ask_one(sites, fewer, step())["state"] == "refused"
    assert ask_one(sites, main, step())["state"] == ""


def test_sums_of_two_views_are_compared_interval_by_interval(sites):
    """Many people differ, and of those who leave up to 40 days with the event one alone."""
    frame = people(0).reset_index(drop=True)
    early = np.flatnonzero((frame["days"] <= 40) & (frame["died"] == 1))[:1]
    late = np.flatnonzero((frame["days"] > 90) & (frame["days"] <= 200) & (frame["died"] == 1))[:20]
    other = frame.assign(age=frame["age"].where(~frame.index.isin([*early, *late]), frame["age"] + 1))
    table(sites, other, "other.csv")
    sites.change("north", "site.yaml", views={"main": VIEW, "other": VIEW | {"path": "other.csv"}})
    sites.restart()
    assert ask_one(sites, canonical(ASK.plain | {"view": "main"}), step())["state"] == ""
    assert ask_one(sites, canonical(ASK.plain | {"view": "other"}), step())["state"] == "refused"
    assert "differ from those of another view's" in reason(sites)


def test_changes_are_counted_interval_by_interval(sites):
    """Twenty people have changed since the last sums, and of those who leave up to 40 days one alone."""
    before = ask_one(sites, ASK.text, step())
    assert before["state"] == ""
    frame = people(0).reset_index(drop=True)
    early = np.flatnonzero((frame["days"] <= 40) & (frame["died"] == 1))[0]
    late = np.flatnonzero((frame["days"] > 90) & (frame["days"] <= 200) & (frame["died"] == 1))[:20]
    frame["age"] = frame["age"].astype(float)
    frame.loc[[early, *late], "age"] += 1.0
    table(sites, frame)
    after = ask_one(sites, ASK.text, step())
    assert after["state"] == "refused"
    assert "Rows of few people have changed" in reason(sites)
    counts = json.loads(ask_one(sites, ASK.text)["json"])
    assert counts["moments"] is None
    frame.loc[np.flatnonzero((frame["days"] <= 40) & (frame["died"] == 1))[:9], "age"] += 1.0
    table(sites, frame)
    assert ask_one(sites, ASK.text, step())["state"] == ""


@pytest.mark.parametrize("sign", [1, -1])
def test_coefficients_do_not_make_a_sum_one_person_s(sites, sign):
    """Under a steep coefficient one person at an end of an interval weighs more than all others."""
    frame = people(0)
    slope = sign * 39 / (np.ptp(frame["age"]) / 10)
    answered = ask_one(sites, ASK.text, step(coefficients=(slope, 0.0)))
    if answered["state"] == "":
        sums, ends = leaving(answered), (frame["age"] - AGE) / 10
        assert not any(np.isclose(ends, mean, rtol=0, atol=1e-6).any() for mean in sums[:, 1] / sums[:, 0])
    assert answered["state"] == "refused" and "a sum would be one person's" in reason(sites)


def test_how_many_rows_lack_a_value_does_not_follow_single_rows(sites):
    frame = people(0)
    frame["marker"] = frame["marker"].astype(object)
    frame.iloc[:5, frame.columns.get_loc("marker")] = ""
    table(sites, frame)
    assert json.loads(ask_one(sites, ASK.text)["json"])["left_out"] == 5
    one = frame.iloc[:1].assign(patient="new", marker="")
    table(sites, pandas.concat([frame, one]))
    assert json.loads(ask_one(sites, ASK.text)["json"])["left_out"] == 5
    more = pandas.concat([one.assign(patient=f"new-{number}") for number in range(4)])
    table(sites, pandas.concat([frame, more]))
    assert json.loads(ask_one(sites, ASK.text)["json"])["left_out"] == 9


def test_a_regression_needs_a_word_of_the_policy(sites):
    sites.change("north", "policy.yaml", survival_regression=False)
    assert Policy.read(sites.kit("north").policy).survival_regression is False
    curves = StudyAsk("curves", Columns("days", "died", "arm", ("0", "1")), edges=EDGES)
    assert ask_one(sites, curves.text)["state"] == ""
    assert ask_one(sites, ASK.text)["state"] == "refused"
    assert "survival_regression" in reason(sites)
    assert ask_one(sites, ASK.text, step())["state"] == "refused"


def test_a_group_that_no_study_may_name_parts_nobody(sites):
    """Its column may be empty where the others are not: people are the same in all tables."""
    frame = people(0).reset_index(drop=True)
    frame["arm"] = frame["arm"].astype(object)
    frame.loc[:9, "arm"] = ""
    table(sites, frame)
    columns = [name for name in COLUMNS.names if name != "arm"]
    sites.change("north", "policy.yaml", survival_columns=columns)
    plain = ASK.plain | {"group": None, "levels": ["all"]}
    found = json.loads(ask_one(sites, canonical(plain))["json"])
    assert found["left_out"] == 10 and found["people"] == len(frame) - 10
