"""What a data steward reads and decides on the page, and that it is what the command line does."""

import re
import socket
from dataclasses import replace

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.desk.catalogue import read_texts
from fedfrozen_app.desk.command import listening
from fedfrozen_app.desk.counting import Count
from fedfrozen_app.desk.proposal_page import diff_rows, implied_keys, table_columns
from fedfrozen_app.exchange.table_part import TablePart
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from tests.desk.steward import PRIVATE, Counted, make_kit, open_desk, put_before, words_of


def test_what_waits_is_listed_and_can_be_read(kit, browser):
    assert "Nothing waits for an answer." in words_of(browser.get().text)
    proposal = put_before(kit, *PRIVATE, "num_rounds=3")
    shown = words_of(browser.get().text)
    assert "fedfrozen on your data “main”, 3 rounds" in shown
    assert "epsilon 3" in shown and "not masked" in shown
    page = browser.get(f"/proposal/{proposal.hash}")
    shown = words_of(page.text)
    for part in (
        "Your rules allow this request.",
        "The server fl.example.org:8443. Ask by telephone who sent it",
        "118 people, 120 rows",
        "5,000 of 20,000",
        f"Updates of the model, no rows: {', '.join(proposal.run.roles)};",
        "NOT masked: the server sees your site's own update.",
        "Epsilon 3, delta 1e-06 for each example",
        "0 spent 3 this request 5 left of 8",
        "You have approved no run before",
        "Version of the program at the server (bundle): bbbbbbbbbbbb",
    ):
        assert part in shown, part
    assert " ".join(proposal.hash[at : at + 4] for at in range(0, 64, 4)) in shown


def test_every_value_of_a_proposal_is_on_its_page(kit, browser):
    proposal = put_before(kit, *PRIVATE)
    shown = browser.get(f"/proposal/{proposal.hash}").text
    for key in flatten(proposal.plain):
        assert f">{key}</bdi>" in shown, key


def test_approve_refuse_and_revoke_are_those_of_the_command_line(kit, browser, capsys):
    first, second = put_before(kit, run="one"), put_before(kit, run="two")
    assert browser.decide(first.hash, "approve").status_code == 303
    assert browser.decide(second.hash, "refuse", "noise is off").status_code == 303
    approvals = Approvals(kit.approvals)
    assert approvals.decision(first.hash).approved and not approvals.decision(second.hash).approved
    assert command(["site", "show", second.hash, str(kit.folder)]) == 0
    assert ": noise is off" in capsys.readouterr().out
    assert browser.decide(first.hash, "revoke", "another model").status_code == 303
    assert not approvals.decision(first.hash).approved
    assert browser.decide(first.hash, "revoke").status_code == 409  # there is nothing to revoke any more
    assert command(["site", "revoke", first.hash, str(kit.folder)]) == 2
    told = [(entry["event"], entry["what"], entry["reason"]) for entry in decide.decisions(kit)]
    assert told == [
        ("approved", "the run one", ""),
        ("refused", "the run two", "noise is off"),
        ("revoked", "the run one", "another model"),
    ]
    shown = words_of(browser.get("/decided").text)
    assert "noise is off" in shown and "another model" in shown


def test_the_difference_to_the_last_approved_run_is_shown(kit, browser, capsys):
    old = put_before(kit, *PRIVATE, "client.local_epochs=1", run="old")
    decide.approve(kit, Approvals(kit.approvals).find(old.hash))
    new = put_before(kit, "client.local_epochs=2", run="new", strategy__warmup_rounds=2)
    shown = words_of(browser.get(f"/proposal/{new.hash}").text)
    assert (
        "What differs from old, which you approved last" in shown
        and "Passes over the rows, each round 1 2" in shown
        and 'Privacy noise "dp_sgd" "none"' in shown
    )
    assert "strategy.warmup_rounds" in shown and "client.batch_size 8" not in shown.split("Every value")[0]
    assert command(["site", "show", new.hash, str(kit.folder)]) == 0
    assert "client.local_epochs: 1 -> 2" in capsys.readouterr().out


def test_columns_of_a_table_come_first_by_name_and_last_by_how_they_are_read():
    scale = {"mean": 1.0, "scale": 2.0}
    before = {"client": {"lr": 0.1}, "table": {"columns": {"age": scale}}}
    after = {"table": {"columns": {"postcode": scale, "age": scale | {"mean": 3.0}}}, "client": {"lr": 0.2}}
    assert diff_rows(before, after) == [
        ("table.columns", '["age"]', '["age", "postcode"]'),
        ("client.lr", "0.1", "0.2"),
        ("table.columns.postcode.mean", "none", "1.0"),
        ("table.columns.postcode.scale", "none", "2.0"),
        ("table.columns.age.mean", "1.0", "3.0"),
    ]
    assert diff_rows(before, before) == [] and diff_rows({"a": 1}, {"a": 2}) == [("a", "1", "2")]


def test_only_differences_that_say_nothing_new_are_folded():
    scale = {"mean": 1.0, "scale": 2.0}
    before = {"privacy": {"name": "dp_sgd", "epsilon": 1.0}, "table": {"columns": {"age": scale}}}
    columns = {"age": {"mean": 3.0, "levels": 2}, "age.x": scale}
    after = {"privacy": {"name": "dp_sgd", "epsilon": 8.0}, "table": {"columns": columns}}
    assert implied_keys(before, after) == {"table.columns.age.x.mean", "table.columns.age.x.scale"}
    assert implied_keys(after, before) == implied_keys(before, after) and not implied_keys(before, before)
    silent = after | {"privacy": {"name": "none", "epsilon": 8.0}}
    assert "privacy.epsilon" in implied_keys(before, silent)
    assert "privacy.name" not in implied_keys(before, silent)
    assert "privacy.epsilon" not in implied_keys(silent, after)


def test_a_verdict_that_is_not_whole_says_so(kit):
    class Counting(Counted):
        def of(self, proposal):
            return Count()

    proposal = put_before(kit)
    shown = words_of(open_desk(kit, counts=Counting(kit.folder)).get(f"/proposal/{proposal.hash}").text)
    assert "As far as is known, your rules allow this request. Not known yet: Rows and people" in shown
    assert "Your rules allow this request." not in shown and "Being counted." in shown


def test_a_page_leads_with_what_decides_and_folds_the_rest(kit, browser):
    """What leaves, columns, people, epsilon and differences are not in a closed part of the page."""
    old = put_before(kit, *PRIVATE, run="old")
    decide.approve(kit, Approvals(kit.approvals).find(old.hash))
    new = put_before(kit, *PRIVATE, "client.local_epochs=2", run="new")
    page = browser.get(f"/proposal/{new.hash}").text
    assert "<details open" not in page and page.count("<details>") == page.count("</details>")
    shown = words_of(re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL))
    order = (
        *("Your rules allow this request.", "What differs from old", "Passes over the rows, each round"),
        *("Who asks", "What leaves", "Columns", "People 118 people", "Privacy Epsilon 3", "5 left of 8"),
        "Your answer",
    )
    assert [shown.index(part) for part in order] == sorted(shown.index(part) for part in order)
    assert new.hash[:4] not in shown.split() and "Learning rate" not in shown


def test_the_columns_of_a_table_are_shown_and_forbidden_ones_named(kit, browser, monkeypatch):
    proposal = put_before(kit)
    wanted = [("age", False), ("<b>postcode", True)]
    monkeypatch.setattr("fedfrozen_app.desk.proposal_page.table_columns", lambda *_: wanted)
    page = browser.get(f"/proposal/{proposal.hash}")
    assert "Columns age, <b>postcode (FORBIDDEN by your rules)" in words_of(page.text)
    assert "<b>postcode" not in page.text
    forbids = Policy.read(kit.policy)
    forbids = replace(forbids, forbidden_columns=("postcode",))
    asked = replace(proposal, table=TablePart("table", columns={"age": {}, "postcode": {}}))
    monkeypatch.undo()
    assert table_columns(asked, forbids) == [("age", False), ("postcode", True)]
    assert table_columns(proposal, forbids) == []


@pytest.mark.parametrize(
    ("policy", "overrides", "rules", "reason"),
    [
        ({"privacy_required": True}, (), "privacy", "it takes part in private runs only"),
        ({"strategies": ["fedavg"]}, (), "strategy", "the strategy fedfrozen is not one"),
        ({"upload_roles": ["head"]}, (), "roles", "which may not leave it"),
        ({"max_epsilon": 2.0}, PRIVATE, "epsilon budget", "the run asks for epsilon 3, and it gives 2"),
        ({"min_people": 119}, (), "rows", "rows of fewer than 119 people"),
        ({"secure_aggregation": "required"}, (), "masks", "masked rounds only"),
        ({"bundles": ["c" * 64]}, (), "bundle", "is not one of those that it allows"),
    ],
)
def test_the_policy_s_verdict_line_by_line(tmp_path, policy, overrides, rules, reason):
    kit = make_kit(tmp_path / "kit", **policy)
    proposal = put_before(kit, *overrides)
    page = open_desk(kit).get(f"/proposal/{proposal.hash}")
    shown = words_of(page.text)
    assert "Your rules refuse this request." in shown and reason in shown
    assert "your rules allow it" not in shown
    listed = words_of(open_desk(kit).get().text)  # where nothing is counted yet
    assert ("your rules refuse it" in listed) == (rules != "rows")
    texts = read_texts()
    refusing = [words_of(texts(f"rule_{rule}")) for rule in rules.split()]  # and no other rule
    found = [words_of(part) for part in page.text.split('<li class="bad">')[1:]]
    assert all(one.startswith(text) for one, text in zip(found, refusing, strict=True))
    box = page.text.split('<div class="box bad"')[1].split("</div>")[0]
    assert box.count('<li class="bad">') == len(found) and "<details" not in page.text.split(box)[0]


def test_what_was_refused_without_asking_is_listed_once(kit, browser):
    assert "Nothing yet." in words_of(browser.get("/decided").text)
    log = AuditLog(kit.audit)
    for number in range(3):
        log.write("refused", message="query", run="nightly", reason=f"it reads <b>{number // 2}</b>")
    log.write("refused", message="query", reason="what was proposed cannot be read")
    log.write("failed", message="train", run="other", error="OSError")
    page = browser.get("/decided").text
    shown = words_of(page)
    assert "nightly it reads <b>0</b> 2 " in shown and "nightly it reads <b>1</b> 1 " in shown
    assert "not known what was proposed cannot be read 1 " in shown and "OSError" not in shown
    assert shown.index("cannot be read") < shown.index("<b>1</b>") < shown.index("<b>0</b>")
    assert "it reads <b>" not in page and page.count('<td class="number">') == 3


def test_what_was_spent_counts(kit, browser):
    budget = SiteBudget(kit.var / "state" / "budget.json")
    log = AuditLog(kit.audit)
    for number, run in enumerate(("first", "second"), 1):
        budget.begin(run, Price(3.0, 1e-6, "example", run[0] * 64), log.head)
        about = {"run": run, "proposal": run[0] * 64, "round": 1, "arrays": {}, "bytes": 2048, "examples": 50}
        log.write("sent", **about, epsilon=3.0, epsilon_all_runs=3.0 * number, delta_all_runs=1e-6 * number)
    proposal = put_before(kit, *PRIVATE)
    shown = words_of(browser.get(f"/proposal/{proposal.hash}").text)
    assert "the run asks for epsilon 3, and 2 is left" in shown
    assert "More than is left: your limit is 8." in shown
    page = browser.get("/budget").text
    assert "Epsilon 6 of 8 is spent, 2 is left." in words_of(page)
    assert page.count("<circle") == 2 and "<script" not in page
    shown = words_of(browser.get("/runs").text)
    assert "second" in shown and "2.0 kB" in shown


def test_the_log_s_chain_is_checked(kit, browser, monkeypatch):
    assert "The log has no entries yet." in words_of(browser.get("/log").text)
    monkeypatch.setattr("fedfrozen_app.desk.app.A_PAGE", 10)
    log = AuditLog(kit.audit)
    for number in range(25):
        log.write("hello", run=f"run-{number}")
    page = browser.get("/log").text
    assert "The chain is whole: 25 entries" in words_of(page) and page.count("<tr><td>") == 10
    older = browser.get("/log?before=15").text
    assert "run-14" in older and "run-15" not in older and "run-4" not in older
    lines = kit.audit.read_text().splitlines(keepends=True)
    kit.audit.write_text("".join([*lines[:10], *lines[11:]]))
    shown = words_of(browser.get("/log").text)
    assert "THE CHAIN IS BROKEN." in shown and "changed or cut at line 11" in shown


def test_a_broken_record_of_decisions_keeps_nobody_from_refusing(kit, browser):
    proposal = put_before(kit)
    (kit.approvals / decide.LOG).write_text("{}\n")
    assert browser.decide(proposal.hash, "approve").status_code == 409
    assert Approvals(kit.approvals).decision(proposal.hash) is None
    answer = browser.decide(proposal.hash, "refuse")
    assert answer.status_code == 409 and "was changed or cut" in words_of(answer.text)
    assert Approvals(kit.approvals).decision(proposal.hash).approved is False


def test_a_limit_is_set_as_by_the_command_line(kit, browser, capsys):
    assert browser.post("/limit", {"key": "max_epsilon", "value": "2.5"}).status_code == 303
    assert Policy.read(kit.policy).max_epsilon == 2.5
    assert "max_epsilon 2.5" in words_of(browser.get("/rules").text)
    assert command(["site", "limit", "max_epsilon", "3", str(kit.folder)]) == 0
    assert capsys.readouterr().out == "max_epsilon was 2.5, and is 3 from the next message on.\n"
    told = [
        (entry["event"], entry["key"], entry["before"], entry["after"]) for entry in decide.decisions(kit)
    ]
    assert told == [("limit", "max_epsilon", 8.0, 2.5), ("limit", "max_epsilon", 2.5, 3)]
    assert "max_epsilon" in words_of(browser.get("/log").text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bundles", "any"),
        ("max_epsilon", "much"),
        ("approval", "never"),
        ("min_people", "-1"),
        ("x", "1"),
        ("max_epsilon", "1\nbundles: any"),
        ("max_epsilon", ""),
    ],
)
def test_a_limit_that_is_none_changes_nothing(kit, browser, key, value):
    before = kit.policy.read_bytes()
    assert browser.post("/limit", {"key": key, "value": value}).status_code == 409
    assert kit.policy.read_bytes() == before and not decide.decisions(kit)
    assert browser.post("/limit", {"key": "max_epsilon", "value": "9", "csrf": "0"}).status_code == 403
    assert kit.policy.read_bytes() == before


def test_the_rules_are_shown(kit, browser):
    shown = words_of(browser.get("/rules").text)
    assert "max_epsilon 8.0" in shown and "fedfrozen" in shown
    kit.policy.write_text("{}")
    assert "does not say" in words_of(browser.get("/rules").text)


def test_the_address_can_be_opened_as_soon_as_it_is_shown():
    with listening(0) as place, socket.create_connection(place.getsockname(), timeout=5):
        pass
