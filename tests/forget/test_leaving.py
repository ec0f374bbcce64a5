"""A site leaves by itself: it gives nothing more, and its signed request is what makes the run forget it."""

import hashlib
import json
import shutil

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.folders import authorities_file, sites_file
from fedfrozen_app.forget.asked import read_request
from fedfrozen_app.forget.command import without_client
from fedfrozen_app.forget.rollback import plan_rollback
from fedfrozen_app.forget.statement import write_statement
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import read_audit
from tests.conftest import same_bits
from tests.sites.conftest import prepared, sites
from tests.sites.inprocess import SiteGrid
from tests.sites.test_approval import people

__all__ = ["prepared", "sites"]  # fixtures

WORDS = ["num_rounds=2", "strategy.warmup_rounds=1", "checkpoint.keep=5", "baseline=false"]


def trained(sites, *more, **options):
    run = sites.train(*WORDS, *more, **options)
    authorities_file(run.folder).parent.mkdir(exist_ok=True)
    shutil.copy(sites.folder / "kits" / "server" / "ca.crt", authorities_file(run.folder))
    return run


def registered(sites, folder):
    """As the command leaves it before the run is submitted."""
    path = sites_file(sites.folder / folder)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(dict(enumerate(sites.names, 1))))


def refused(capsys, *words):
    capsys.readouterr()
    assert command(list(map(str, words))) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def leave(sites, name, *more):
    assert command(["site", "leave", "test", str(sites.kit(name).folder), *more]) == 0
    return sites.kit(name).folder / "leave-test.json"


def test_a_site_leaves_and_the_run_goes_on_without_it(sites, capsys):
    run = trained(sites)
    request = leave(sites, "north", "--reason", "consent withdrawn")
    shown = capsys.readouterr().out
    assert "It has 2 updates of this site's, from round 1 on." in shown
    # Its own record says so, in the chain; the executor's log is the executor's.
    (last,) = read_audit(sites.kit("north").approvals / "decisions.jsonl")
    assert (last["event"], last["what"], last["reason"]) == ("left", "the run test", "consent withdrawn")
    assert command(["site", "audit", str(sites.kit("north").folder)]) == 0
    assert '"what": "the run test"' in capsys.readouterr().out
    # The operators' side: who asked, what it costs.
    words = ["forget", str(run.folder), "--request", str(request)]
    assert command([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "north asked for it on" in shown and "(consent withdrawn)" in shown
    assert "Client north first took part in round 1: the run restarts from the beginning" in shown
    # And it gets no further reply: the same run, continued, has two sites.
    more = sites.train(*WORDS, "num_rounds=3", "++runtime.min_nodes=2", resume=True)
    assert more.rows[-1]["clients"] == ["south", "west"]
    refusals = [one for one in read_audit(sites.kit("north").audit) if one["event"] == "refused"]
    assert refusals and "this site has left the run" in json.dumps(refusals[-1])


def test_the_model_is_that_of_sites_among_which_it_never_was(sites):
    run = trained(sites)
    rollback = plan_rollback(run.folder, "north")
    composed = without_client(rollback, sites.folder / "without", trusted=True)
    assert composed.config.exclude_clients == ["north"] and composed.config.start_from is None
    assert composed.config.run_id is None  # a new run, which sites approve and count as one
    assert rollback.summary["config"]["runtime"]["min_nodes"] == 3
    assert composed.config.runtime.min_nodes == 2  # it does not wait for the one that left

    class NeverThere(SiteGrid):
        def get_node_ids(self):
            return [node for node in super().get_node_ids() if node != 1]

    two = ["++runtime.min_nodes=2", "++run_id=other"]
    registered(sites, "without")
    without = sites.train(*WORDS, *two, "exclude_clients=[north]", folder="without")
    expected = sites.train(*WORDS, *two[:1], "++run_id=third", folder="expected", make_grid=NeverThere)
    assert same_bits(without.model, expected.model) and not same_bits(without.model, run.model)
    events = [one for one in read_audit(sites.kit("north").audit) if one.get("run") == "other"]
    assert events == []  # it was not even asked
    # The statement names the request that it answers.
    request = leave(sites, "north", "--reason", "consent withdrawn")
    asked = read_request(run.folder, request)
    found = write_statement(rollback, without.folder, composed.config, None, asked)
    own = json.loads((without.folder / "forget.json").read_text())["request"]
    assert found["request"] == own and (own["site"], own["reason"]) == ("north", "consent withdrawn")
    assert own["sha256"] == hashlib.sha256(request.read_bytes()).hexdigest()


def test_who_left_is_asked_nothing_by_approval_either(sites, capsys):
    """The policy asks people: they approve the run that goes on without the other site as a new one."""
    run = trained(sites)
    for name in sites.names:
        sites.change(name, "policy.yaml", approval="ask")
    leave(sites, "north")
    kit = sites.kit("south")
    registered(sites, "without")
    two = ["++run_id=other", "++runtime.min_nodes=2", "++runtime.approval_timeout=1"]
    with pytest.raises(UserError, match="nobody has approved the run at south, west"):
        sites.train(*WORDS, *two, "exclude_clients=[north]", folder="without")
    assert command(["site", "pending", str(kit.folder)]) == 0
    assert "run other" in capsys.readouterr().out
    assert not list(sites.kit("north").approvals.glob("*.json"))
    assert run.rows[-1]["clients"] == ["north", "south", "west"]


def test_who_left_cannot_approve_the_run_again_by_mistake(sites, capsys):
    for name in sites.names:
        sites.change(name, "policy.yaml", approval="ask")
    run = sites.train(*WORDS, make_grid=people(sites, north="approve", south="approve", west="approve"))
    assert run.rows[-1]["clients"] == ["north", "south", "west"]
    leave(sites, "north")
    (asked,) = Approvals(sites.kit("north").approvals).asked()
    said = refused(capsys, "site", "approve", asked.hash, sites.kit("north").folder)
    assert "north has left the run test" in said and "another id" in said
    events = [one["event"] for one in read_audit(sites.kit("north").approvals / "decisions.jsonl")]
    assert events == ["approved", "left"]


def test_a_request_is_believed_only_from_the_site_itself(sites, tmp_path, capsys):
    run = trained(sites)
    request = leave(sites, "north")
    text = json.loads(request.read_text())
    words = ["forget", run.folder, "--dry-run"]
    other = tmp_path / "other.json"
    for change, expected in (
        ({"site": "south"}, "its certificate is that of the site north"),
        ({"reason": "something else"}, "its signature is another's"),
        ({"run": "later"}, "its signature is another's"),
        ({"purpose": "masks"}, "is of another format"),
        ({"site": 7}, "something else than texts"),
        ({"more": "x"}, "other keys"),
    ):
        other.write_text(json.dumps(text | {"request": text["request"] | change}))
        said = refused(capsys, *words, "--request", other)
        assert expected in said and "have the site send it again" in said
    for content in (
        "",
        "{",
        "[" * 50,
        "{}",
        '{"request": {}, "certificate": "x", "signature": "!"}',
        "x" * 30_000,
    ):
        other.write_text(content)
        assert "cannot be used" in refused(capsys, *words, "--request", other)
    assert "cannot be read" in refused(capsys, *words, "--request", tmp_path / "none.json")
    # Of another federation's authority; for another run; by both names; of a simulation.
    (tmp_path / "again").mkdir()
    strange = type(sites)(tmp_path / "again")
    strange.prepare()
    shutil.copy(strange.folder / "kits" / "server" / "ca.crt", authorities_file(run.folder))
    assert "not of this federation's authority" in refused(capsys, *words, "--request", request)
    shutil.copy(sites.folder / "kits" / "server" / "ca.crt", authorities_file(run.folder))
    assert "not both" in refused(capsys, *words, "--client", "north", "--request", request)
    assert "not both" in refused(capsys, *words)
    summary = run.folder / "summary.json"
    summary.write_text(summary.read_text().replace('"run_id": "test"', '"run_id": "later"'))
    (run.folder / "manifest.jsonl").unlink(missing_ok=True)
    said = refused(capsys, *words, "--request", request)
    assert "is about the run test, and" in said and "is later" in said
    authorities_file(run.folder).unlink()
    assert "ran over no real sites" in refused(capsys, *words, "--request", request)


def test_a_site_leaves_only_what_it_was_part_of(sites, capsys):
    folder = sites.kit("north").folder
    assert "it has sent none to any run" in refused(capsys, "site", "leave", "test", folder)
    trained(sites)
    assert "give one of test" in refused(capsys, "site", "leave", "tes", folder)
    long = refused(capsys, "site", "leave", "test", folder, "--reason", "x" * 501)
    assert "give 500 at most" in long and not list(folder.glob("leave-*.json"))
    path = leave(sites, "north")
    assert "exists already" in refused(capsys, "site", "leave", "test", folder)
    assert path.exists()
