"""A census of real sites: kits, policies, approvals, budgets, logs; only Flower's processes are left out."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedfrozen_app.census.ask import Ask, read_ask
from fedfrozen_app.census.memory import write_memory
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.census_messages import CENSUS, census_message
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.run.take_census import take_census
from fedfrozen_app.server.asking import Asking, Limits, census_question
from fedfrozen_app.sites import handle_census
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.approval_verbs import approve, pending, show
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request_handler import RequestHandler
from fedfrozen_app.sites.site_budget import Price
from fedfrozen_app.sites.site_check import check_policy
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites, copy_of

AGES = [0, 18, 40, 65, 120]
SECRET = "the-secret-of-this-site"
VIEW = {
    "kind": "text", "path": "notes.csv", "text_column": "text", "label_column": "label",
    "classes": ["flu", "fracture", "stroke"], "unit": "patient", "unit_column": "patient",
}  # fmt: skip


def notes(seed: int, rows: int = 240) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    patients = rng.integers(0, rows // 2, rows)
    return pandas.DataFrame(
        {
            "text": [f"note {row} of the patient with fever and {SECRET}" for row in range(rows)],
            "label": ["stroke"] * 3 + rng.choice(["flu", "fracture"], rows - 3, p=[0.6, 0.4]).tolist(),
            "patient": [f"{seed}-{number}" for number in patients],
            "age": (patients * 7) % 95,
            "postcode": [f"{SECRET}-{row}" for row in range(rows)],
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("census")
    sites = Sites(folder)
    sites.prepare()
    for number, name in enumerate(sites.names):
        notes(number).to_csv(folder / "kits" / name / "notes.csv", index=False)
        sites.change(name, "site.yaml", views={"main": VIEW})
        columns = {"age": AGES}
        sites.change(name, "policy.yaml", census=True, census_floor=5, census_columns=columns)
    return folder


@pytest.fixture
def sites(prepared, tmp_path):
    copy_of(prepared, tmp_path / "sites")
    found = Sites(tmp_path / "sites")
    found.restart()
    return found


def ask_all(sites: Sites, ask: Ask, timeout: float = 0.5) -> tuple[dict, Asking]:
    sites.restart()
    asking = Asking(SiteGrid(sites.executors), ask, census_question(ask), Limits(3, timeout))
    return take_census(asking, sites.folder / "out"), asking


def ask_one(sites: Sites, text: object, name: str = "north", bundle: str = BUNDLE) -> dict:
    """The site's answer as it travels."""
    SiteGrid(sites.executors)
    message = census_message(1, text, 60) if isinstance(text, str) else None
    if message is None:
        message = Message(RecordDict({"census": ConfigRecord({"ask": text})}), 1, CENSUS)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = sites.executors[name].handle(message, context, bundle)
    assert set(reply.content) == {"census"}
    return dict(reply.content["census"])


def reasons(sites: Sites, name: str = "north") -> list[str]:
    return [entry.get("reason", "") for entry in read_audit(sites.kit(name).audit)]


ASK = Ask("one", columns={"age": tuple(map(float, AGES))})


def test_three_sites_are_counted_and_one_that_refuses_is_named(sites):
    sites.change("west", "policy.yaml", census=False)
    found, _ = ask_all(sites, ASK)
    assert set(found["sites"]) == {"north", "south"} and list(found["refused"]) == ["west"]
    assert found["advice"][0]["topic"] == "refused" and found["advice"][0]["site"] == "west"
    frame = notes(0)
    north = found["sites"]["north"]
    assert (north["rows"], north["people"]) == (len(frame), frame["patient"].nunique())
    ages = north["moments"]["numbers/age"]
    assert ages["mean"] == pytest.approx(frame["age"].mean()) and ages["rows"] == len(frame)
    # Strokes are of a few people: hidden, and with them others.
    assert "stroke" in north["tables"]["classes"]["hidden"]
    assert len(north["tables"]["classes"]["hidden"]) >= 2
    for name, event in (("north", "census"), ("south", "census"), ("west", "refused")):
        (entry,) = read_audit(sites.kit(name).audit)
        assert entry["event"] == event and entry["proposal"] == ASK.hash
    assert reasons(sites, "west") == ["it takes part in no census"]
    assert SECRET not in (sites.folder / "out" / "census.json").read_text()


def test_nothing_but_the_answer_leaves(sites):
    told = ask_one(sites, ASK.text)
    assert set(told) == {"name", "state", "json", "anchor"} and told["name"] == "north"
    assert SECRET not in canonical(told) and "0-1" not in told["json"]
    entry = read_audit(sites.kit("north").audit)[-1]
    assert entry["bytes"] == len(told["json"].encode())
    assert set(json.loads(told["json"])["tables"]) >= {"classes", "numbers/age", "length", "language"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        (canonical(ASK.plain | {"path": "/etc"}), "other keys than a census"),
        (canonical(ASK.plain | {"columns": {"postcode": ["a"]}}), "postcode, which the policy does not name"),
        (canonical(ASK.plain | {"columns": {"age": [0, 18, 40, 64, 120]}}), "other edges than the policy"),
        (canonical(ASK.plain | {"columns": {"age": [0, 120]}}), "other edges than the policy"),
        (canonical(ASK.plain | {"view": "other"}), "no view of this site"),
        (canonical(ASK.plain | {"view": "../main"}), "no name of a view"),
        (canonical(ASK.plain | {"matches": True}), "hashes of rows, which do not leave"),
        (canonical(ASK.plain | {"epsilon": 9.0}), "asks for epsilon 9"),
        (canonical(ASK.plain | {"floor": 0}), "floor is out of bounds"),
        (canonical(ASK.plain | {"format": 2}), "another version"),
    ],
)
def test_a_hostile_server_gets_the_one_refusal(sites, text, reason):
    told = ask_one(sites, text)
    told.pop("anchor")
    assert told == {"name": "north", "state": "refused", "json": ""}
    assert reason in reasons(sites)[-1]


def test_another_floor_of_the_server_changes_nothing(sites):
    """A site keeps to its own: the server's is for simulated clients."""
    low, high = (
        json.loads(ask_one(sites, canonical(ASK.plain | {"floor": floor}))["json"]) for floor in (1, 50)
    )
    assert low == high and low["floor"] == 5


def test_asked_again_the_site_says_the_same_until_enough_people_have_changed(sites):
    first = ask_one(sites, ASK.text)["json"]
    path = sites.folder / "kits" / "north" / "notes.csv"
    frame = pandas.read_csv(path)

    def add(people: int, age: int, label: str = "flu") -> None:
        nonlocal frame
        new = frame.iloc[:people].assign(
            patient=[f"new-{len(frame)}-{number}" for number in range(people)], age=age, label=label,
            text=[f"a new note {len(frame)} {number} of the patient" for number in range(people)],
        )  # fmt: skip
        frame = pandas.concat([frame, new])
        path.write_text(frame.to_csv(index=False))
        sites.restart()  # as after a night: only the disk remembers

    add(4, 30)  # one fewer than the floor
    assert ask_one(sites, ASK.text)["json"] == first
    add(1, 30)
    second = json.loads(ask_one(sites, ASK.text)["json"])
    assert second["rows"] == json.loads(first)["rows"] + 5
    # One person more in another age: the total moves with the next ones, that table does not.
    add(1, 80, "fracture")
    add(5, 30)
    third = json.loads(ask_one(sites, ASK.text)["json"])
    assert third["rows"] == second["rows"] + 6
    assert third["tables"]["numbers/age"] == second["tables"]["numbers/age"]
    # The classes are all hidden: of them only the sum is told, which has moved by enough.
    classes = second["tables"]["classes"]
    assert classes["hidden"] and third["tables"]["classes"] == classes | {"total": classes["total"] + 6}


@pytest.mark.parametrize(("fewer", "refused"), [(1, True), (4, True), (5, False), (0, False)])
def test_two_views_that_differ_in_fewer_people_than_the_floor_are_not_both_counted(sites, fewer, refused):
    """The difference of the two answers would be about these alone."""
    folder = sites.folder / "kits" / "north"
    frame = notes(0)
    gone = frame["patient"].drop_duplicates().iloc[10 : 10 + fewer]
    frame[~frame["patient"].isin(gone)].to_csv(folder / "less.csv", index=False)
    sites.change("north", "site.yaml", views={"main": VIEW, "less": {**VIEW, "path": "less.csv"}})
    sites.restart()
    main, less = replace(ASK, view="main"), replace(ASK, view="less", id="two")
    first = ask_one(sites, main.text)["json"]
    second = ask_one(sites, less.text)
    assert (not second["json"]) == refused
    if refused:
        assert "fewer than 5 differ from those of the view main" in reasons(sites)[-1]
        assert not (sites.kit("north").var / "census" / "less.json").exists()
    else:
        assert json.loads(second["json"])["people"] == json.loads(first)["people"] - fewer
    assert ask_one(sites, main.text)["json"] == first  # whatever was asked in between


def test_one_row_less_of_one_person_is_a_difference_too(sites):
    folder = sites.folder / "kits" / "north"
    notes(0).iloc[1:].to_csv(folder / "less.csv", index=False)
    sites.change("north", "site.yaml", views={"main": VIEW, "less": {**VIEW, "path": "less.csv"}})
    sites.restart()
    assert ask_one(sites, replace(ASK, view="less").text)["json"]
    assert not ask_one(sites, replace(ASK, view="main").text)["json"]
    assert "of the view less" in reasons(sites)[-1]


def test_views_of_other_people_do_not_meet(sites):
    folder = sites.folder / "kits" / "north"
    notes(7).to_csv(folder / "others.csv", index=False)
    sites.change("north", "site.yaml", views={"main": VIEW, "others": {**VIEW, "path": "others.csv"}})
    sites.restart()
    assert all(ask_one(sites, replace(ASK, view=name).text)["json"] for name in ("main", "others"))


def test_a_person_decides_where_the_policy_says_so(sites, capsys):
    sites.change("north", "policy.yaml", census="ask")
    kit = str(sites.folder / "kits" / "north")
    assert ask_one(sites, ASK.text)["state"] == "waiting"
    assert ask_one(sites, ASK.text)["state"] == "waiting"
    assert [entry["event"] for entry in read_audit(sites.kit("north").audit)] == ["pending"]
    pending([kit])
    assert "census one: what data there are" in capsys.readouterr().out
    show([ASK.hash, kit])
    shown = capsys.readouterr().out
    assert "nothing is trained" in shown and "columns   age" in shown
    approve([ASK.hash[:12], kit])
    assert ask_one(sites, ASK.text)["state"] == ""
    assert ask_one(sites, canonical(ASK.plain | {"id": "two"}))["state"] == "waiting"  # another hash
    Approvals(sites.kit("north").approvals).decide(ASK.hash, approved=False)
    assert ask_one(sites, ASK.text)["state"] == "refused"


def test_noise_is_paid_for_from_the_budget_of_all_runs(sites):
    sites.change("north", "policy.yaml", max_epsilon=3.0, privacy_required=True)
    told = ask_one(sites, ASK.text)
    assert told["state"] == "refused" and "counts with noise only" in reasons(sites)[-1]
    noisy = Ask("two", columns=ASK.columns, epsilon=2.0)
    first = ask_one(sites, noisy.text)
    found = json.loads(first["json"])
    assert found["epsilon"] == 2.0 and found["moments"]["numbers/age"] is None
    assert sites.executors["north"].site.budget.spent() == (2.0, 0.0)
    sites.restart()  # the budget and the log agree when it starts anew
    assert ask_one(sites, noisy.text)["json"] == first["json"]  # at no cost
    assert sites.executors["north"].site.budget.spent() == (2.0, 0.0)
    other = Ask("three", columns=ASK.columns, epsilon=2.0)  # under another name it is another draw
    assert ask_one(sites, other.text)["state"] == "refused"
    assert reasons(sites)[-1] == "the run asks for epsilon 2, and 1 is left"
    # A record of what was spent that is lost ends all work.
    sites.executors["north"].site.budget.path.unlink()
    with pytest.raises(UserError, match="does not know round 1 of the run census-"):
        RequestHandler(sites.kit("north"))


NOISY = Ask("noisy", columns=ASK.columns, epsilon=2.0)


def test_whether_noise_is_drawn_again_depends_on_no_row(sites):
    """Before, the answer changed when one patient left, and the server knew that one had."""
    sites.change("north", "policy.yaml", max_epsilon=9.0)
    first = ask_one(sites, NOISY.text)["json"]
    notes(0).iloc[:-1].to_csv(sites.folder / "kits" / "north" / "notes.csv", index=False)
    sites.restart()
    assert ask_one(sites, NOISY.text)["json"] == first
    assert sites.executors["north"].site.budget.spent() == (2.0, 0.0)
    again = ask_one(sites, canonical(NOISY.plain | {"id": "later"}))["json"]
    assert again != first and sites.executors["north"].site.budget.spent() == (4.0, 0.0)


def test_an_answer_with_noise_that_is_lost_is_not_drawn_again(sites):
    """Before, each loss gave another draw at no cost, and the mean of twelve had next to no noise."""
    sites.change("north", "policy.yaml", max_epsilon=9.0)
    first = ask_one(sites, NOISY.text)["json"]
    memory = sites.kit("north").var / "census" / "main.json"
    backup = memory.read_bytes()
    memory.unlink()
    sites.restart()
    assert ask_one(sites, NOISY.text)["state"] == "refused"
    assert "main.json does not hold its answer: bring the file back from a backup" in reasons(sites)[-1]
    memory.write_bytes(backup)
    assert ask_one(sites, NOISY.text)["json"] == first
    assert sites.executors["north"].site.budget.spent() == (2.0, 0.0)


def test_a_charge_whose_answer_was_not_written_is_not_drawn_again(sites, monkeypatch):
    sites.change("north", "policy.yaml", max_epsilon=9.0)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(handle_census, "write_memory", full)
        assert ask_one(sites, NOISY.text)["json"] == ""
    assert sites.executors["north"].site.budget.spent() == (2.0, 0.0)
    assert ask_one(sites, NOISY.text)["state"] == "refused" and "was charged as" in reasons(sites)[-1]


def test_answers_with_noise_of_an_earlier_version_stay_answers(sites):
    """It named charges after the rows, charged an ask again for changed rows, and gave another run_id the
    same answer: the budget does not know that one, the log does."""
    sites.change("north", "policy.yaml", max_epsilon=9.0)
    site = sites.executors["north"].site
    price = Price(2.0, 0.0, "patient", NOISY.hash)
    for charged in ("census-of-old-rows", "census-of-new-rows"):
        site.budget.charge(charged, price, 1, NOISY.hash, site.audit.head)
    other = Ask("other", columns=ASK.columns, epsilon=2.0)
    details = {"run": other.id, "proposal": other.hash, "epsilon": 2.0, "charged": "census-of-old-rows"}
    site.audit.write("census", **details)
    kept = {"census-of-old-rows": "old", "census-of-new-rows": "new"}
    write_memory(site.kit.var / "census" / "main.json", {"noised": kept})
    sites.restart()
    assert [ask_one(sites, ask.text)["json"] for ask in (NOISY, other)] == ["new", "old"]
    assert sites.executors["north"].site.budget.spent() == (4.0, 0.0)


def test_the_policy_is_strict_where_it_says_nothing(sites, tmp_path):
    path = sites.folder / "kits" / "north" / "policy.yaml"
    policy = Policy.read(path)
    assert policy.census is True and policy.subgroups == ()
    for key, value, sentence in (
        ("census", "maybe", "census must be yes, no or ask"),
        ("census_floor", 2, "census_floor must be 3 or more"),
        ("census_columns", {"age": [3, 2]}, "do not rise"),
        ("census_columns", ["age"], "must say edges or words"),
        ("subgroups", "sex", "must be a list of words"),
    ):
        sites.change("south", "policy.yaml", **{key: value})
        with pytest.raises(UserError, match=sentence):
            Policy.read(sites.folder / "kits" / "south" / "policy.yaml")
        sites.change("south", "policy.yaml", census=True, census_floor=5, census_columns={}, subgroups=[])


def test_hashes_leave_only_under_a_key_of_the_sites_own(sites):
    asks = Ask("m", matches=True)
    for name in sites.names:
        sites.change(name, "policy.yaml", census_matches=True)
        sites.change(name, "site.yaml", match_key="words that only sites know")
    shared = notes(0).head(30)
    for name in ("south", "west"):
        path = sites.folder / "kits" / name / "notes.csv"
        own = pandas.read_csv(path)
        own["text"] = own["text"] + f" at {name}"  # or every note would be at every site
        if name == "south":
            own = pandas.concat([own, shared.assign(patient=[f"x{n}" for n in range(30)])])
        own.to_csv(path, index=False)
    found, _ = ask_all(sites, asks)
    assert found["matches"] == {"north | south": 30, "north | west": 0, "south | west": 0}
    sites.change("west", "policy.yaml", census_matches=False)
    found, _ = ask_all(sites, asks)
    assert list(found["refused"]) == ["west"] and set(found["matches"]) == {"north | south"}


def test_no_hash_of_a_row_leaves_a_site_that_requires_privacy(sites):
    """Hashes are exact: whoever has the key tests with them whether a row is there, whatever epsilon says."""
    sites.change("north", "policy.yaml", census_matches=True, privacy_required=True, max_epsilon=1.0)
    sites.change("north", "site.yaml", match_key="words that only sites know")
    sites.restart()
    for ask, reason in (
        (Ask("a", epsilon=0.01, matches=True), "noise (epsilon) hides no hash of a row"),
        (Ask("b", matches=True), "counts with noise only"),
    ):
        assert ask_one(sites, ask.text) | {"anchor": ""} == {
            "name": "north", "state": "refused", "json": "", "anchor": "",
        }  # fmt: skip
        assert reason in reasons(sites)[-1]
    assert sites.executors["north"].site.budget.spent() == (0.0, 0.0)
    kit = sites.kit("north")
    assert Policy.read(kit.policy).census_rules(kit.match_key).key is None
    assert "census_matches has no effect" in check_policy(kit)


def test_noise_and_hashes_are_not_asked_for_in_one_census():
    with pytest.raises(ValueError, match="ask for one of the two"):
        read_ask(Ask("a", epsilon=1.0, matches=True).text)


def test_the_steward_is_shown_what_hashes_mean(sites, capsys):
    sites.change("north", "policy.yaml", census="ask", census_matches=True)
    sites.change("north", "site.yaml", match_key="words that only sites know")
    sites.restart()
    ask = Ask("m", matches=True)
    assert ask_one(sites, ask.text)["state"] == "waiting"
    kit = str(sites.folder / "kits" / "north")
    show([ask.hash, kit])
    assert "hashes    OF EVERY ROW, exact: whoever has match_key" in capsys.readouterr().out
    sites.change("north", "policy.yaml", privacy_required=True)
    show([ask.hash, kit])
    assert "THE POLICY REFUSES THEM" in capsys.readouterr().out
