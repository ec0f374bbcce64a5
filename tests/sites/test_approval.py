"""`approval: ask`: nothing runs but what a person at the site has approved, by its hash."""

import json
import os
import threading
import time
from dataclasses import fields

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.exchange.proposal import Proposal, read_proposal
from fedfrozen_app.exchange.strict import canonical, hash_of
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.policy import Policy
from tests.conftest import Run
from tests.sites.federation import SITES, federation
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites, copy_of
from tests.sites.test_hostile import ask, proposed
from tests.sites.twin import join, words

ROUND = ("num_rounds=1", "strategy.warmup_rounds=1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asking")
    sites = Sites(folder)
    sites.prepare()
    for name in sites.names:
        sites.change(name, "policy.yaml", approval="ask")
    return folder


@pytest.fixture
def sites(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    monkeypatch.setattr("fedfrozen_app.server.membership.WAITING_PAUSE", 0.1)
    copy_of(prepared, tmp_path / "sites")
    return Sites(tmp_path / "sites")


def waiting(kit) -> list[Proposal]:
    approvals = Approvals(kit.approvals)
    return [one for one in approvals.proposals() if approvals.decision(one.hash) is None]


def people(sites: Sites, **answers: str):
    """A grid on which people at these sites answer, with approve or refuse, once they are asked."""

    class Asked(SiteGrid):
        def run_client(self, message):
            reply = super().run_client(message)
            name = self.executors[message.metadata.dst_node_id - 1].kit.name
            kit = sites.kit(name)
            for one in waiting(kit):
                if name in answers:
                    assert command(["site", answers[name], one.hash[:12], str(kit.folder)]) == 0
            return reply

    return Asked


def events(sites: Sites, name: str) -> list[str]:
    return [entry["event"] for entry in read_audit(sites.kit(name).audit)]


def test_a_run_waits_for_people_and_then_runs(sites, caplog):
    run = sites.train(*ROUND, make_grid=people(sites, north="approve", south="approve", west="approve"))
    assert run.rows[1]["clients_ok"] == 3
    for name in sites.names:
        assert events(sites, name) == ["pending", "hello", "sent"]  # polls in between tell and write nothing
        assert f"Waiting for a person at the site {name} to approve the run" in caplog.text
    hello = read_audit(sites.kit("north").audit)[1]
    assert hello["approved_by"] not in ("", "the policy")
    assert hello["proposal"] in caplog.text  # by which both sides can compare
    # The same once more, after a restart: nobody is asked again, and the very same update is sent.
    sites.train(*ROUND, folder="again")
    assert events(sites, "north") == ["pending", "hello", "sent", "hello", "sent"]


def test_a_person_s_no_is_the_same_refusal(sites):
    no = people(sites, north="approve", south="approve", west="refuse")
    with pytest.raises(UserError, match=r"Only 2 of 3 nodes .* the site west refused; its own log says why"):
        sites.train(*ROUND, make_grid=no)
    last = read_audit(sites.kit("west").audit)[-1]
    assert last["event"] == "refused" and "a person refused it" in last["reason"]


def test_two_approve_and_one_has_not(sites):
    two = people(sites, north="approve", south="approve")
    with pytest.raises(UserError, match="nobody has approved the run at west within 1 s") as error:
        sites.train(*ROUND, "runtime.approval_timeout=1", make_grid=two)
    (asked,) = waiting(sites.kit("west"))
    assert asked.hash in str(error.value)
    run = sites.train(*ROUND, "run_id=two", "runtime.min_nodes=2", make_grid=two, folder="two")
    assert run.rows[1]["clients"] == ["north", "south"]


@pytest.mark.slow
def test_who_approves_late_joins_the_next_round(sites):
    class Late(people(sites, north="approve", south="approve")):
        def run_client(self, message):
            if message.metadata.group_id == "2":
                for one in waiting(sites.kit("west")):
                    command(["site", "approve", one.hash, str(sites.kit("west").folder)])
                time.sleep(0.2)
            return super().run_client(message)

    run = sites.train("num_rounds=3", "strategy.warmup_rounds=1", "runtime.min_nodes=2", make_grid=Late)
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2, 3]


@pytest.mark.parametrize("word", ["client.lr=0.5", "num_rounds=2", "privacy=dp_sgd", "runtime.view=main"])
@pytest.mark.slow
def test_what_was_changed_after_its_approval_waits_anew(sites, word):
    everybody = dict.fromkeys(sites.names, "approve")
    sites.train(*ROUND, make_grid=people(sites, **everybody))
    with pytest.raises(UserError, match="nobody has approved the run at north, south, west"):
        sites.train(*ROUND, word, "runtime.approval_timeout=1", folder="changed")
    assert events(sites, "north") == ["pending", "hello", "sent", "pending"]
    assert len(waiting(sites.kit("north"))) == 1


@pytest.mark.slow
def test_a_run_that_has_begun_can_be_stopped(sites):
    class Stopped(people(sites, **dict.fromkeys(sites.names, "approve"))):
        def run_client(self, message):
            if message.metadata.group_id == "2":
                (one,) = Approvals(sites.kit("west").approvals).proposals()
                command(["site", "refuse", one.hash, str(sites.kit("west").folder)])
            return super().run_client(message)

    run = sites.train("num_rounds=2", "strategy.warmup_rounds=1", make_grid=Stopped)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2]
    assert "a person refused it" in read_audit(sites.kit("west").audit)[-1]["reason"]


def test_a_proposal_in_plain_words(sites, capsys):
    private = ("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-6", "runtime.approval_timeout=1")
    with pytest.raises(UserError):
        sites.train(*ROUND, *private)
    kit = sites.kit("north")
    sites.change("north", "policy.yaml", upload_roles=["head", "mlp"])
    capsys.readouterr()
    assert command(["site", "pending", str(kit.folder)]) == 0
    line = capsys.readouterr().out
    (asked,) = waiting(kit)
    assert line.startswith(asked.hash) and "run test: fedfrozen, 1 rounds, epsilon 3" in line
    assert command(["site", "show", asked.hash[:8], str(kit.folder)]) == 0
    shown = capsys.readouterr().out
    for words_ in (
        "run       test, 1 round\n",
        "strategy  fedfrozen (",
        "warmup_rounds 1",
        "view      main (images)",
        "updates of the parameters: head, mlp\n",
        "refused by the policy: embedding, key, norm, output, query, value",
        "epsilon 3, delta 1e-06 for each example, over the whole run",
        "epsilon 8 and delta 0.0001 are left, before this run",
    ):
        assert words_ in shown, words_
    assert command(["site", "show", "0" * 12, str(kit.folder)]) == 2
    assert command(["site", "approve", asked.hash[:3], str(kit.folder)]) == 2  # too little of it
    assert waiting(kit)
    assert command(["site", "approve", asked.hash, str(kit.folder)]) == 0 and not waiting(kit)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("3f9a", ""),
        ("3f9b", "The hashes of 2 proposals begin with 3f9b: give more characters."),
        ("3f9b0", ""),
        ("3f9", "'3f9' is too short for a hash: give 4 characters of it or more."),
        ("", "'' is too short for a hash"),
        ("beef", "No proposal's hash begins with beef: `fedfrozen site pending` lists what waits."),
    ],
)
def test_a_hash_is_known_by_its_first_characters(tmp_path, word, answer):
    """`fedfrozen site show 3f9a`, as its help has it; never one of several."""
    for start in ("3f9a0", "3f9b0", "3f9b1"):
        (tmp_path / f"{start:0<64}.json").write_text("{}")
    if not answer:
        assert Approvals(tmp_path).find(word).hash.startswith(word)
        return
    with pytest.raises(UserError) as error:
        Approvals(tmp_path).find(word)
    assert answer in str(error.value)


PRIVATE = ("privacy=dp_sgd", "privacy.epsilon=3", "client=sgd", "client.momentum=0", "client.weight_decay=0")
IN_SUM = (*PRIVATE, "secure_aggregation=on", "secure_aggregation.noise=sum")
EVERYTHING = (*IN_SUM, "adapter=lora", "client.lr=0.25", "client.local_steps=7", "seed=77")


def asked_of(sites, *overrides):
    """What a server would ask; put before the people of north."""
    proposal = read_proposal(canonical(proposed(*overrides)))
    Approvals(sites.kit("north").approvals).ask(proposal)
    return proposal


def test_every_value_that_is_hashed_is_shown(sites, capsys):
    """Before, `client.lr=1e6`, `local_epochs=100000` and others were approved without being seen."""
    proposal = asked_of(sites, *EVERYTHING)
    assert command(["site", "show", proposal.hash, str(sites.kit("north").folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split("every value that the hash covers:")[1].split())
    values = flatten(proposal.plain)
    # No part of a proposal can be left out here: each has a value, but for those of runs that read texts or
    # tables, and a codec, which goes with no masks.
    assert {key.split(".")[0] for key in values} | {"texts", "table", "codec"} == {
        one.name for one in fields(Proposal)
    }
    for key, value in values.items():
        assert f"{key}={json.dumps(value)}" in shown, key
    for part in ("client.lr=0.25", "client.local_steps=7", "run.seed=77", "secure_aggregation.threshold="):
        assert part in shown


def test_the_codec_of_a_run_is_shown(sites, capsys):
    proposal = asked_of(sites, "codec=int8", "codec.block=96")
    assert command(["site", "show", proposal.hash, str(sites.kit("north").folder)]) == 0
    shown = capsys.readouterr().out
    for key, value in flatten({"codec": proposal.plain["codec"]}).items():
        assert f"{key}={json.dumps(value)}" in shown, key
    assert "96" in shown and "int8" in shown


def test_a_person_sees_whether_the_noise_is_in_the_sum_alone(sites, capsys):
    kit = str(sites.kit("north").folder)
    for overrides, told in ((IN_SUM, True), (PRIVATE, False)):
        proposal = asked_of(sites, *overrides)
        for verb in (["pending"], ["show", proposal.hash], ["approve", proposal.hash]):
            assert command(["site", *verb, kit]) == 0
            shown = capsys.readouterr().out
            assert ("IN THE SUM ONLY" in shown) is told, verb
            assert ("of three sites none" in shown) is told


def test_noise_in_the_sum_alone_needs_a_word_of_the_policy(sites):
    kit = sites.kit("north")
    asked, own = asked_of(sites, *IN_SUM), asked_of(sites, *PRIVATE)
    change = {"privacy_required": True, "approval": "policy"}
    for noise_in_sum, refused in ((None, True), (False, True), (True, False)):
        sites.change("north", "policy.yaml", **change, noise_in_sum=bool(noise_in_sum))
        if noise_in_sum is None:  # as in policies of before
            text = kit.policy.read_text()
            kit.policy.write_text("\n".join(x for x in text.splitlines() if "noise_in_sum" not in x))
        policy = Policy.read(kit.policy)
        problem = policy.problem_of_proposal(asked, kit.view(None), BUNDLE)
        assert ("noise_in_sum" in (problem or "")) is refused
        assert "noise_in_sum" not in (policy.problem_of_proposal(own, kit.view(None), BUNDLE) or "")


def test_an_account_without_a_name_can_decide(tmp_path, monkeypatch):
    """As in a container, whose list of accounts does not hold the kit's owner."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("fedfrozen_app.sites.approval.pwd.getpwuid", nobody)
    approvals = Approvals(tmp_path)
    approvals.decide("a" * 64, approved=True)
    decision = approvals.decision("a" * 64)
    assert decision and decision.approved and decision.by == f"account {os.getuid()}"


def test_a_decision_that_cannot_be_read_is_no_approval(sites):
    class Damaged(people(sites, **dict.fromkeys(sites.names, "approve"))):
        def run_client(self, message):
            for path in sites.kit("west").approvals.glob("*.decision"):
                path.write_text("{")
            return super().run_client(message)

    with pytest.raises(UserError, match="the site west refused"):
        sites.train(*ROUND, make_grid=Damaged)


# The log's anchors ------------------------------------------------------------------------------------------


def test_a_log_that_was_shortened_is_found_by_the_server_s_anchors(sites, capsys):
    sites.train(*ROUND, make_grid=people(sites, **dict.fromkeys(sites.names, "approve")))
    anchors, kit = sites.folder / "run" / "anchors.jsonl", sites.kit("north")
    told = [json.loads(line) for line in anchors.read_text().splitlines()]
    assert {one["site"] for one in told} == set(sites.names)
    audit = ["site", "audit", str(kit.folder), "--anchors", str(anchors)]
    assert command(audit) == 0
    assert "The log holds all of the" in capsys.readouterr().out
    lines = kit.audit.read_text().splitlines(keepends=True)
    kit.audit.write_text("".join(lines[:-1]))
    assert command(["site", "audit", str(kit.folder)]) == 0  # by itself a shorter log is a sound one
    assert command(audit) == 2
    assert "disagree: the server was told of an entry" in capsys.readouterr().err
    assert command([*audit[:-1], str(kit.audit)]) == 2


# Over real kits ---------------------------------------------------------------------------------------------


class Submitted(threading.Thread):
    """A run that waits for people, as its own command."""

    def __init__(self, line: list[str]) -> None:
        super().__init__()
        self.line, self.code = line, -1
        self.start()

    def run(self) -> None:
        import subprocess

        done = subprocess.run(["fedfrozen", *self.line], check=False, capture_output=True, text=True)
        self.code, self.told = done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_people_decide_over_real_kits_with_tls(tmp_path):
    """Approve and run; changed after it; two approve and one does not; one refuses."""
    rounds = (*ROUND, "runtime.node_timeout=120")

    with federation(tmp_path / "fed", SITES) as deployment:
        kits = {site: deployment.kits / site for site in SITES}
        join(deployment, SITES)
        for site in SITES:
            deployment.change(site, "policy.yaml", approval="ask")

        def decide(verb: str, *sites: str) -> str:
            """By the same command that people use, once the site has been asked."""
            deadline = time.monotonic() + 120
            for site in sites:
                approvals = Approvals(kits[site] / "var" / "approvals")
                while not (asked := [p for p in approvals.proposals() if approvals.decision(p.hash) is None]):
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
                assert command(["site", verb, asked[0].hash, str(kits[site])]) == 0
            return asked[0].hash

        def submit(name: str, *more: str, folder: str = "") -> Submitted:
            return Submitted(words(deployment, tmp_path / (folder or name), *rounds, f"run_id={name}", *more))

        run = submit("approved", "runtime.min_nodes=3")
        agreed = decide("approve", *SITES)
        run.join(300)
        assert run.code == 0, run.told
        assert Run(tmp_path / "approved").rows[1]["clients_ok"] == 3

        # The same run with one number changed: it has another hash, and nobody has approved that.
        more = ("client.lr=0.5", "runtime.min_nodes=3", "runtime.approval_timeout=20")
        changed = submit("approved", *more, folder="changed")
        changed.join(300)
        assert changed.code == 2 and "nobody has approved the run at north, south, west" in changed.told
        assert agreed not in changed.told
        for site in SITES:
            log = [e["event"] for e in read_audit(kits[site] / "var" / "audit.jsonl")]
            assert log == ["pending", "hello", "sent", "pending"]
            assert command(["site", "refuse", pending_hash(kits[site]), str(kits[site])]) == 0

        # Two approve: enough for one run, and not for another, which names who is missing.
        run = submit("two", "runtime.min_nodes=2")
        decide("approve", "north", "south")
        run.join(300)
        assert run.code == 0, run.told
        assert Run(tmp_path / "two").rows[1]["clients"] == ["north", "south"]
        assert command(["site", "refuse", pending_hash(kits["west"]), str(kits["west"])]) == 0
        run = submit("three", "runtime.min_nodes=3", "runtime.approval_timeout=25")
        decide("approve", "north", "south")
        run.join(300)
        assert run.code == 2 and "nobody has approved the run at west" in run.told

        # One refuses.
        assert command(["site", "refuse", pending_hash(kits["west"]), str(kits["west"])]) == 0
        run = submit("refused", "runtime.min_nodes=3", "runtime.node_timeout=25")
        decide("approve", "north", "south")
        decide("refuse", "west")
        run.join(300)
        assert run.code == 2 and "the site west refused; its own log says why" in run.told
        last = read_audit(kits["west"] / "var" / "audit.jsonl")[-1]
        assert last["event"] == "refused" and "a person refused it" in last["reason"]
        anchors = ["--anchors", str(tmp_path / "two" / "anchors.jsonl")]
        assert command(["site", "audit", str(kits["north"]), *anchors]) == 0


def pending_hash(kit) -> str:
    approvals = Approvals(kit / "var" / "approvals")
    (asked,) = [one for one in approvals.proposals() if approvals.decision(one.hash) is None]
    return asked.hash


# One file that cannot be read -------------------------------------------------------------------------------


def asked_by(sites: Sites, capsys, *words: str) -> tuple[int, str, str]:
    code = command(["site", words[0], *words[1:], str(sites.kit("north").folder)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def two_asked(sites):
    """North was asked for a run, and then for one whose settings hold the words of a census."""
    sites.restart()
    SiteGrid(sites.executors)
    hostile = proposed("run_id=hostile")
    hostile["data"]["more"] = {"kind": "census"}
    for plain in (proposed(), hostile):
        assert ask(sites, canonical(plain))["state"] == "waiting"
    return [hash_of(proposed()), hash_of(hostile)]


def test_a_proposal_that_looks_like_a_census_does_not_lock_the_steward_out(sites, two_asked, capsys):
    """Before, all four commands ended in a traceback, while a run approved earlier went on."""
    honest, hostile = two_asked
    code, out, _ = asked_by(sites, capsys, "pending")
    assert code == 0 and [line[:64] for line in out.splitlines()] == [honest, hostile]
    code, out, _ = asked_by(sites, capsys, "show", hostile)
    assert code == 0 and "run       test, 3 rounds" in out
    assert asked_by(sites, capsys, "approve", honest[:12])[0] == 0
    assert asked_by(sites, capsys, "refuse", hostile[:12])[0] == 0
    assert "Nothing waits" in asked_by(sites, capsys, "pending")[1]


@pytest.mark.parametrize(
    "damage", ["{", "", '{"format":2}', '{"kind":"census"}', "[" * 5000, "\udcff", "another", "folder"]
)
def test_a_file_that_cannot_be_read_is_listed_and_can_be_refused(sites, two_asked, capsys, damage):
    honest, other = two_asked
    path = sites.kit("north").approvals / f"{other}.json"
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "another":
        path.write_text(path.with_name(f"{honest}.json").read_text())
    else:
        path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    code, out, _ = asked_by(sites, capsys, "pending")
    lines = {line[:64]: line for line in out.splitlines()}
    assert code == 0 and set(lines) == {honest, other}
    assert "CANNOT BE READ" in lines[other] and "run test" in lines[honest]
    code, out, _ = asked_by(sites, capsys, "show", other)
    assert code == 0 and "CANNOT BE READ" in out
    code, _, err = asked_by(sites, capsys, "approve", other)
    assert code == 2 and "nobody can know what it asks for" in err and "Traceback" not in err
    assert asked_by(sites, capsys, "approve", honest)[0] == 0
    assert asked_by(sites, capsys, "refuse", other)[0] == 0
    assert "Nothing waits" in asked_by(sites, capsys, "pending")[1]


def test_a_damaged_record_of_epsilon_does_not_keep_the_steward_from_refusing(sites, two_asked, capsys):
    budget = sites.kit("north").var / "state" / "budget.json"
    budget.parent.mkdir(parents=True, exist_ok=True)
    budget.write_text("{")
    assert asked_by(sites, capsys, "pending")[0] == 0
    code, out, _ = asked_by(sites, capsys, "show", two_asked[0])
    assert code == 0 and "budget    UNKNOWN" in out
    assert asked_by(sites, capsys, "refuse", two_asked[0])[0] == 0
