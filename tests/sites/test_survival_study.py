"""A survival study of real sites: kits, policies, approvals, budgets, logs, without Flower's processes."""

import hashlib
import json

import numpy as np
import pandas
import pytest
from flwr.app import Context, RecordDict
from sksurv.nonparametric import kaplan_meier_estimator
from statsmodels.duration.hazard_regression import PHReg

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.study_messages import study_message
from fedfrozen_app.run.take_study import take_study
from fedfrozen_app.server.asking import Asking, Limits
from fedfrozen_app.sites.approval_verbs import approve, pending, show
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.study.study_ask import COX, Step, StudyAsk
from fedfrozen_app.survival.people import Columns
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites, copy_of
from tests.survival.drawn import study

SECRET = "the-secret-of-this-site"
EDGES = (0.0, 40.0, 90.0, 200.0)
VIEW = {
    "kind": "text",
    "path": "people.csv",
    "unit": "patient",
    "unit_column": "patient",
    "classes": ["a", "b"],
}
POLICY = {
    "survival": "binned", "census_floor": 3, "survival_columns": ["days", "died", "arm", "age", "marker"],
    "survival_edges": list(EDGES), "survival_groups": {"arm": [0, 1]},
    "survival_regression": True,
}  # fmt: skip
COLUMNS = Columns("days", "died", "arm", ("0", "1"), ("age", "marker"))
ASK = StudyAsk("one", COLUMNS, edges=EDGES)


def people(number: int) -> pandas.DataFrame:
    """Two hundred or more patients of a site; of the third none has the event."""
    parts = [pandas.DataFrame(study(seed)) for seed in range(1 + 20 * number, 21 + 20 * number, 4)]
    frame = pandas.concat(parts).rename(columns={"time": "days", "event": "died"}).drop(columns="site")
    if number == 2:
        frame["died"] = 0
    return frame.assign(patient=[f"{SECRET}-{number}-{row}" for row in range(len(frame))])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    sites = Sites(folder)
    sites.prepare()
    for number, name in enumerate(sites.names):
        people(number).to_csv(folder / "kits" / name / "people.csv", index=False)
        sites.change(name, "site.yaml", views={"main": VIEW})
        sites.change(name, "policy.yaml", **POLICY)
    return folder


@pytest.fixture
def sites(prepared, tmp_path):
    copy_of(prepared, tmp_path / "sites")
    found = Sites(tmp_path / "sites")
    found.restart()
    return found


def ask_all(sites: Sites, ask: StudyAsk, timeout: float = 5.0) -> dict:
    sites.restart()
    grid = SiteGrid(sites.executors)

    def make(ask, question, only=None):
        return Asking(grid, ask, question, Limits(3 if only is None else len(only), timeout), only=only)

    return take_study(ask, make, sites.folder / "out")


def ask_one(
    sites: Sites, ask: str, step: str = Step().text, name: str = "north", bundle: str = BUNDLE
) -> dict:
    SiteGrid(sites.executors)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = sites.executors[name].handle(study_message(1, ask, step, 60), context, BUNDLE)
    return dict(reply.content["census"])


def reason(sites: Sites, name: str = "north") -> str:
    return read_audit(sites.kit(name).audit)[-1].get("reason", "")


def rounded(frame: pandas.DataFrame, shown: list[float]) -> tuple[np.ndarray, np.ndarray]:
    time = np.array(shown)[np.maximum(np.searchsorted(shown, np.minimum(frame["days"], shown[-1])), 1)]
    return time, ((frame["died"] == 1) & (frame["days"] <= shown[-1])).to_numpy()


@pytest.mark.parametrize("strata", ["none", "site"])
def test_three_sites_give_what_the_pooled_rows_give(sites, strata):
    found = ask_all(sites, StudyAsk("one", COLUMNS, edges=EDGES, strata=strata))
    frame = pandas.concat([people(number).assign(site=number) for number in range(3)])
    shown = [0.0, *found["all"]["times"]]
    assert shown == list(EDGES) and found["problem"] == ""
    time, event = rounded(frame, shown)
    _, survival = kaplan_meier_estimator(event, time)
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    groups = frame["site"] if strata == "site" else None
    fit = PHReg(time, frame[["age", "marker"]].to_numpy(), status=event, ties="efron", strata=groups).fit(
        tol=1e-12
    )
    rows = found["cox"]["covariates"]
    assert [row["coefficient"] for row in rows] == pytest.approx(fit.params, abs=1e-6)
    assert [row["error"] for row in rows] == pytest.approx(fit.bse, abs=1e-6)
    assert found["sites"]["west"]["events"] == 0
    for name in sites.names:
        entries = read_audit(sites.kit(name).audit)
        assert [entry["event"] for entry in entries] == ["survival"] * len(entries)
        assert [entry["step"] for entry in entries] == ["counts", *["cox"] * (len(entries) - 1)]
        assert {entry["proposal"] for entry in entries} == {found["asked"]["hash"]}
    assert SECRET not in (sites.folder / "out" / "survival.json").read_text()


def test_a_site_that_refuses_is_named_and_the_others_go_on(sites):
    sites.change("west", "policy.yaml", survival="none")
    found = ask_all(sites, ASK)
    assert set(found["sites"]) == {"north", "south"} and list(found["refused"]) == ["west"]
    assert reason(sites, "west") == "it takes part in no survival study"
    assert [entry["event"] for entry in read_audit(sites.kit("west").audit)] == ["refused"]  # asked once


def test_exact_times_need_the_policys_word_and_then_are_the_pooled_rows(sites):
    exact = StudyAsk("exact", COLUMNS)
    with pytest.raises(RunFailed, match="No site answered"):
        ask_all(sites, exact)
    assert "exact times, and the policy gives edges alone" in reason(sites)
    for name in sites.names:
        sites.change(name, "policy.yaml", survival="exact")
    found = ask_all(sites, exact)
    frame = pandas.concat([people(number) for number in range(3)])
    _, survival = kaplan_meier_estimator(frame["died"] == 1, frame["days"])
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    assert read_audit(sites.kit("north").audit)[-1]["exact_times"] is True


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read"),
        (canonical(ASK.plain | {"path": "/etc"}), "other keys than a survival study"),
        (
            canonical(ASK.plain | {"covariates": ["patient"]}),
            "asks for the column patient, which",
        ),
        (canonical(ASK.plain | {"edges": [0, 40, 91, 200]}), "between other edges than the policy's"),
        (canonical(ASK.plain | {"edges": [0, 40, 90]}), "between other edges than the policy's"),
        (canonical(ASK.plain | {"levels": ["0", "2"]}), "other groups of the column arm"),
        (canonical(ASK.plain | {"group": "marker"}), "other groups of the column marker"),
        (canonical(ASK.plain | {"edges": None}), "exact times"),
        (canonical(ASK.plain | {"epsilon": 1.0}), "noise (epsilon) is for counts between edges"),
        (canonical(ASK.plain | {"covariates": [], "epsilon": 9.0}), "asks for epsilon 9"),
        (canonical(ASK.plain | {"view": "other"}), "no view of this site"),
        (canonical(ASK.plain | {"format": 2}), "another version"),
    ],
)
def test_a_hostile_server_gets_the_one_refusal(sites, text, sentence):
    found = ask_one(sites, text)
    found.pop("anchor")
    assert found == {"name": "north", "state": "refused", "json": ""}
    assert sentence in reason(sites)


def step(**changes) -> str:
    plain = {"times": EDGES[1:], "centre": (60.0, 0.0), "width": (10.0, 1.0), "coefficients": (0.0, 0.0)}
    return Step(COX, **(plain | changes)).text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (step(times=(40.0, 91.0)), "other times than the study's edges"),
        (step(times=(90.0, 40.0)), "do not increase"),
        (step(coefficients=(0.0,)), "do not fit the covariates"),
        (step(width=(10.0, 1e-9)), "a sum would be one person's"),
        (step(width=(10.0, -1.0)), "width is not above 0"),
        (canonical({"step": "rows"}), "other keys than one of a study"),
    ],
)
def test_a_hostile_step_is_refused(sites, text, sentence):
    if "1e-09" in text:  # coefficients that part the people
        text = step(width=(10.0, 1e-3), coefficients=(0.0, 1.0))
    assert ask_one(sites, ASK.text, text)["state"] == "refused"
    assert sentence in reason(sites)


def test_sums_over_few_people_do_not_leave(sites):
    assert ask_one(sites, ASK.text, step())["state"] == ""
    sites.change("north", "policy.yaml", census_floor=60)
    sites.restart()
    assert ask_one(sites, ASK.text, step())["state"] == "refused"
    assert "sums over fewer than 60 people" in reason(sites)


def test_few_changed_rows_are_not_revealed(sites):
    """One patient more: the counts stay as they were, and no sums leave."""
    first = json.loads(ask_one(sites, ASK.text)["json"])
    path = sites.folder / "kits" / "north" / "people.csv"
    frame = pandas.read_csv(path)

    def add(count: int) -> None:
        nonlocal frame
        new = frame.iloc[:count].assign(
            patient=[f"new-{len(frame)}-{row}" for row in range(count)], days=30, died=1
        )
        frame = pandas.concat([frame, new])
        frame.to_csv(path, index=False)
        sites.restart()

    add(1)
    again = json.loads(ask_one(sites, ASK.text)["json"])
    assert again["tables"] == first["tables"] and again["moments"] is None
    assert ask_one(sites, ASK.text, step())["state"] == "refused"
    assert "Rows of few people have changed" in reason(sites)
    add(12)
    third = json.loads(ask_one(sites, ASK.text)["json"])
    assert third["people"] == first["people"] + 13 and third["moments"] is not None


def test_a_person_decides_where_the_policy_says_so(sites, capsys):
    sites.change("north", "policy.yaml", approval="ask")
    kit = str(sites.folder / "kits" / "north")
    assert ask_one(sites, ASK.text)["state"] == "waiting"
    pending([kit])
    assert "survival study one: died by days, counts between 4 edges" in capsys.readouterr().out
    show([ASK.hash, kit])
    shown = capsys.readouterr().out
    assert "nothing is trained" in shown and "regression of age, marker" in shown and "joined" in shown
    assert "THE POLICY REFUSES IT" not in shown
    approve([ASK.hash[:12], kit])
    assert ask_one(sites, ASK.text)["state"] == "" and ask_one(sites, ASK.text, step())["state"] == ""
    assert ask_one(sites, canonical(ASK.plain | {"id": "two"}))["state"] == "waiting"


def test_what_is_sent_is_what_the_log_says(sites):
    text = ask_one(sites, ASK.text)["json"]
    entry = read_audit(sites.kit("north").audit)[-1]
    assert entry["answer"] == hashlib.sha256(text.encode()).hexdigest() and entry["bytes"] == len(
        text.encode()
    )
    assert SECRET not in text


def test_noise_is_charged_once_and_answered_again(sites):
    ask = StudyAsk("noisy", Columns("days", "died", "arm", ("0", "1")), edges=EDGES, epsilon=1.5)
    sites.change("north", "policy.yaml", privacy_required=True, max_epsilon=2.0)
    first = ask_one(sites, ask.text)["json"]
    sites.restart()
    assert ask_one(sites, ask.text)["json"] == first
    assert sites.executors["north"].site.budget.spent()[0] == 1.5
    other = canonical(ask.plain | {"id": "again"})
    assert ask_one(sites, other)["state"] == "refused"
    assert ask_one(sites, canonical(ASK.plain))["state"] == "refused"
    assert "counts with noise only" in reason(sites)
    sites.restart()  # the audit log and the budget agree


def test_a_days_answers_are_limited(sites):
    sites.change("north", "policy.yaml", survival_answers_per_day=2)
    assert [ask_one(sites, ASK.text)["state"] for _ in range(3)] == ["", "", "refused"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"survival": "yes"}, "survival must be none, binned, exact"),
        ({"survival_edges": [0, 90, 60]}, "survival_edges must increase"),
        ({"survival_edges": "90"}, "survival_edges must increase"),
        ({"survival_groups": {"arm": ["A"]}}, "survival_groups must say two levels"),
        ({"survival_columns": "days"}, "survival_columns must be a list"),
    ],
)
def test_a_policy_that_cannot_be_read_is_one_sentence(sites, change, sentence):
    sites.change("north", "policy.yaml", **change)
    with pytest.raises(UserError, match=sentence):
        Policy.read(sites.kit("north").policy)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda frame: frame.assign(days=-1), "followed for a time below 0"),
        (lambda frame: frame.assign(age="old"), "is no number"),
        (lambda frame: frame.assign(patient="one"), "A person has several rows"),
        (lambda frame: frame.drop(columns="age"), "There is no column age"),
    ],
)
def test_rows_that_do_not_fit_stay_here_and_are_named_in_the_log_alone(sites, change, sentence):
    path = sites.folder / "kits" / "north" / "people.csv"
    change(pandas.read_csv(path)).to_csv(path, index=False)
    assert ask_one(sites, ASK.text)["json"] == ""
    assert sentence in reason(sites)
