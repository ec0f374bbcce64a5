"""A site keeps the last word: what its executor answers, refuses, remembers and writes down."""

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from safetensors.torch import load_file

from fedfrozen_app import client_app
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.messages import read_reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.disk import waiting_for_room
from fedfrozen_app.files.seal import sealed
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.privacy.budget import Declined
from fedfrozen_app.sites.audit_log import FIRST, AuditLog, read_audit
from fedfrozen_app.sites.authority import Authority
from fedfrozen_app.sites.executor import alone
from fedfrozen_app.sites.executor import main as executor_of
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.kit_templates import Filled
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.row_counts import count_rows
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from fedfrozen_app.sites.site_templates import POLICY_STRICT, POLICY_YAML
from tests.conftest import full_disk, same_bits, slowly
from tests.sites.federation import VIEWS
from tests.sites.inprocess import BUNDLE, SiteGrid

NO_KERNEL = ["embedding", "value", "output", "mlp", "norm", "head"]
ROUNDS = ("num_rounds=3", "strategy.warmup_rounds=2")
PRIVATE = ("privacy=dp_sgd", "privacy.epsilon=3")


def events(sites, name="north"):
    return read_audit(sites.kit(name).audit)


def refused(sites, *overrides, name="north", **how):
    """Why the site took no part in this run: its own log says so, and the server's sentence does not."""
    with pytest.raises((RuntimeError, UserError)) as error:
        sites.train(*overrides, **how)
    last = events(sites, name)[-1]
    assert "its own log says why" in str(error.value) and last["reason"] not in str(error.value)
    return last["reason"]


def test_a_run_over_three_sites_and_its_record(sites):
    run = sites.train(*ROUNDS)
    assert [row.get("clients") for row in run.rows[1:]] == [["north", "south", "west"]] * 3
    assert all(row["clients_failed"] == 0 for row in run.rows[1:])
    log = events(sites)
    assert [entry["event"] for entry in log] == ["hello", "sent", "sent", "sent"]
    uploaded = [len(entry["arrays"]) for entry in log[1:]]
    assert uploaded[0] == uploaded[1] > uploaded[2]  # the kernel stays home after the switch
    bytes_up = sum(e["bytes"] for name in sites.names for e in events(sites, name)[1:2])
    assert bytes_up == sum(run.rows[1]["bytes_up_by_role"].values())
    assert log[1]["run"] == "test" and log[1]["bundle"] == BUNDLE and log[1]["epsilon"] is None
    assert log[0]["view"] == "main" and log[0]["approved_by"] == "the policy"
    assert len({entry["proposal"] for entry in log}) == 1
    assert all(entry["examples"] % 10 == 0 for entry in log[1:])  # rounded, as the view declares no number


@pytest.mark.parametrize(
    ("policy", "overrides", "sentence"),
    [
        ({"strategies": ["fedavg"]}, (), "the strategy fedfrozen is not one of those"),
        ({"bundles": ["0" * 64]}, (), "the bundle bbbbbbbbbbbb is not one of those"),
        ({"privacy_required": True}, (), "private runs only"),
        ({}, ("runtime.view=other",), "it names no view"),
        ({}, ("dataset.keep_classes=[0,1,2]",), "the run's classes are not those of the view main"),
        ({"hellos_per_day": 0}, (), None),
        ({"refusals_per_day": 0}, (), None),
    ],
)
def test_a_run_that_the_policy_forbids_gets_no_hello(sites, policy, overrides, sentence):
    for name in sites.names:
        sites.change(name, "policy.yaml", **policy)
    if sentence is None:  # a day's limit is not written down again and again
        with pytest.raises(UserError, match="the site north refused; its own log says why"):
            sites.train(*overrides)
        assert events(sites) == []
        return
    assert sentence in refused(sites, *overrides)
    assert {entry["event"] for entry in events(sites)} == {"refused"}


@pytest.mark.parametrize(
    ("policy", "overrides", "sentence"),
    [
        pytest.param(
            {"upload_roles": ["value", "output", "mlp", "norm", "head"]},
            (),
            "asks for embedding parameters",
            marks=pytest.mark.slow,
        ),
        (
            {"upload_roles": ["embedding", "value", "output", "mlp", "norm", "head"]},
            (),
            "asks for key parameters",
        ),
        pytest.param({"min_examples": 1000}, (), "fewer than 1000 examples", marks=pytest.mark.slow),
        ({"min_examples": 50}, ("client.local_steps=1",), "fewer than 50 examples"),
        pytest.param({"rounds_per_day": 0}, (), "sent 0 updates in 24 hours", marks=pytest.mark.slow),
        ({"min_people": 1000}, (), "rows of fewer than 1000 people"),
    ],
)
def test_an_order_that_one_site_forbids_goes_on_without_it(sites, policy, overrides, sentence):
    sites.change("south", "policy.yaml", **policy)
    run = sites.train("num_rounds=1", "strategy.warmup_rounds=1", *overrides)
    assert run.rows[1]["clients_ok"] == 2
    (failure,) = run.rows[1]["failures"]
    assert failure == f"Client south was set aside: it failed: {client_app.FAILED}."
    assert sentence in events(sites, "south")[-1]["reason"]
    assert [entry["event"] for entry in events(sites, "south")] == ["hello", "refused"]


def test_after_the_switch_a_site_that_keeps_its_kernel_takes_part(sites):
    sites.change("south", "policy.yaml", upload_roles=NO_KERNEL)
    run = sites.train("num_rounds=2", "strategy.warmup_rounds=1")
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda request: replace(request, algorithm="fedprox"), "the algorithm fedprox"),
        (lambda request: replace(request, round=9), "round 9 of 1"),
        (lambda request: replace(request, round=0.5 + request.round / 2), "round 1.0 of 1"),
        (lambda request: replace(request, plan=Plan.full([*request.plan.trained, "spy"])), "names spy"),
        (
            lambda request: replace(request, base=dict.fromkeys(request.base, "../../model")),
            "that is no digest",
        ),
        # Otherwise these would be whatever the site's model held before: nobody's values.
        (
            lambda request: without_a_frozen_name(request),
            "gives no start value for vit.embeddings.cls_token",
        ),
        (
            lambda request: as_judgement(without_a_frozen_name(request)),
            "gives no start value for vit.embeddings.cls_token",
        ),
    ],
)
def test_an_order_of_another_kind_is_refused(sites, change, sentence):
    class Changed(SiteGrid):
        def run_client(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                request, _ = train_handler.read_train(message)
                message.content["order"] = ConfigRecord({"json": change(request).json})
            return super().run_client(message)

    words = ("num_rounds=1", "strategy.warmup_rounds=1")
    assert sentence in refused(sites, *words, folder="changed", make_grid=Changed)


def without_a_frozen_name(request):
    name = "vit.embeddings.cls_token"
    base = {key: value for key, value in request.base.items() if key != name}
    return replace(request, plan=request.plan.freeze([name]), base=base)


def as_judgement(request):
    return replace(request, plan=replace(request.plan, shared=()), evaluate=True)


def test_other_messages_are_refused(sites):
    sites.restart()
    grid = SiteGrid(sites.executors)
    message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.EVALUATE)
    reply = grid.run_client(message)
    assert reply.error.reason == client_app.FAILED
    assert "knows no evaluate messages" in events(sites)[-1]["reason"]


def test_an_exception_on_a_site_stays_there(sites, monkeypatch):
    def fail(*args):
        raise RuntimeError("patient Mustermann in /data/patients.csv")

    monkeypatch.setattr(train_handler, "train_client", fail)
    with pytest.raises(RuntimeError, match=client_app.FAILED):
        sites.train("num_rounds=1", "strategy.warmup_rounds=1")
    run = (sites.folder / "run" / "metrics.jsonl").read_text()
    assert "Mustermann" not in run and "patients" not in run
    assert events(sites)[-1]["event"] == "failed" and events(sites)[-1]["error"] == "RuntimeError"


def test_a_policy_that_cannot_be_read_allows_nothing(sites):
    path = sites.folder / "kits" / "north" / "policy.yaml"
    good = path.read_text()
    sites.restart()

    class Break(SiteGrid):
        def run_client(self, message):
            path.write_text("strategies: [" if message.metadata.message_type == MessageType.TRAIN else good)
            return super().run_client(message)

    run = sites.train("num_rounds=1", "strategy.warmup_rounds=1", make_grid=Break)
    assert run.rows[1]["clients_ok"] == 2 and client_app.FAILED in run.rows[1]["failures"][0]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("privacy_required: true\n", "says privacy_required twice"),  # the later one would count
        ("max_delta: 1e-6\n", r"max_delta must be a number from 0 on \(1\.0e-6: YAML asks for the point\)"),
        ("max_delta: .nan\n", "max_delta must be a number"),
        ("privacy: true\n", "unknown key privacy"),
    ],
)
def test_a_slip_in_the_policy_ends_with_a_sentence(sites, line, sentence):
    path = sites.kit("north").policy
    kept = [old for old in path.read_text().splitlines(True) if not old.startswith("max_delta")]
    path.write_text(line + "".join(kept))
    with pytest.raises(UserError, match=sentence):
        Policy.read(path)


@pytest.mark.parametrize("said", ["0", "1", "0.0", "Ask"])
def test_a_census_is_allowed_by_yes_or_ask_alone(tmp_path, said):
    """0 equals no, and was taken for something else than no."""
    (tmp_path / "policy.yaml").write_text(re.sub("@census\\b", said, filled_in(POLICY_YAML)))
    with pytest.raises(UserError, match="census must be yes, no or ask"):
        Policy.read(tmp_path / "policy.yaml")


def filled_in(template: str) -> str:
    """A strict policy, in which the answer about censuses is still open."""
    strict = POLICY_STRICT | {"bundle": "any", "census": "@census"}
    return Filled(template).substitute(strict)


def test_a_key_of_a_view_that_is_said_twice_is_named(tmp_path):
    views = "views: {main: {kind: digits, unit: patient, unit_column: id, unit: example}}"
    (tmp_path / "site.yaml").write_text(f"name: north\nsuperlink: x:1\nfolder: var\n{views}\n")
    with pytest.raises(UserError, match="says unit twice"):
        Kit.read(tmp_path)
    two = "views: &all {main: {kind: digits}, other: &one {kind: digits}, third: *one}"
    (tmp_path / "site.yaml").write_text(f"name: north\nsuperlink: x:1\nfolder: var\n{two}\n")
    assert list(Kit.read(tmp_path).views) == ["main", "other", "third"]


def test_a_kit_has_one_executor_at_a_time(sites):
    kit = sites.kit("north")
    with alone(kit), pytest.raises(UserError, match="is running already"):
        executor_of([str(kit.folder)])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda kit: (kit / "executor.sh").write_text("exit"),
            r"executor\.sh is not as the authority signed",
        ),
        (
            lambda kit: (kit / "ca.crt").write_bytes((kit.parent / "other.crt").read_bytes()),
            "is not signed by",
        ),
        (
            lambda kit: (kit / "manifest.json").unlink(),
            r"older version\. Renew it with `fedfrozen site renew`",
        ),
    ],
    ids=["a changed script", "another authority", "a kit from before there were lists"],
)
def test_an_executor_starts_from_a_whole_kit_only(sites, harm, sentence):
    folder = sites.kit("north").folder
    Authority.make(folder.parent / "strange", None)
    shutil.copy(folder.parent / "strange" / "ca.crt", folder.parent / "other.crt")
    harm(folder)
    with pytest.raises(UserError, match=sentence):
        executor_of([str(folder)])


def test_an_executor_that_crashes_leaves_no_memory_on_the_disk():
    """In the parent's own limits a crash would write one."""
    code = (
        "import os, resource\n"
        "from fedfrozen_app.sites.executor import keep_to_itself\n"
        "keep_to_itself()\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE), oct(os.umask(0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(0, 0) 0o77"


# What leaves beside arrays ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_and_true_row_counts_leave_only_where_the_site_says_so(sites):
    sites.change("north", "site.yaml", views={"main": VIEWS["main"] | {"examples": 500}})
    for name in ("north", "south"):
        sites.change(name, "policy.yaml", metrics=False)
    run = sites.train(*ROUNDS)
    assert all(row["clients_ok"] == 3 for row in run.rows[1:])
    sent = {name: [e for e in events(sites, name) if e["event"] == "sent"] for name in sites.names}
    assert {entry["examples"] for entry in sent["north"]} == {500}
    assert all(entry["metrics"] == {} for name in ("north", "south") for entry in sent[name])
    assert all("train_loss" in entry["metrics"] for entry in sent["west"])
    loss = sent["west"][0]["metrics"]["train_loss"]
    assert run.rows[1]["train_loss"] == pytest.approx(loss)  # the mean of those who tell
    weights = [500, *(sent[name][0]["examples"] for name in ("south", "west"))]
    effective = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    assert run.rows[1]["effective_clients"] == pytest.approx(effective)


def test_a_run_without_any_figure_is_a_run(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", metrics=False)
    run = sites.train("num_rounds=1", "strategy.warmup_rounds=1")
    assert run.rows[1]["clients_ok"] == 3 and "train_loss" not in run.rows[1]
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "completed"


def test_how_a_model_does_on_a_site_s_rows_is_a_figure_too(sites):
    sites.change("north", "policy.yaml", metrics=False)
    sites.change("south", "policy.yaml", judgements_per_day=0)
    run = sites.train("strategy=local", "num_rounds=1")
    judged = json.loads((run.folder / "personal.json").read_text())
    assert set(judged["not_judged"]) == {"north", "south"} and len(judged["clients"]) == 1
    assert "such figures do not leave it" in events(sites)[-1]["reason"]


@pytest.mark.parametrize(
    ("unit", "column", "people"),
    [("example", None, 5), ("patient", "who", 2), ("patient", None, None), ("document", "who", None)],
)
def test_people_are_those_of_the_view_s_column(sites, unit, column, people):
    sites.restart()
    view = replace(sites.kit("north").view(None), unit=unit, unit_column=column)
    columns = {"who": np.array(["a", "b", "b", "a", "a", "c"], dtype=object)}
    worker = SimpleNamespace(corpus=SimpleNamespace(columns=columns))
    assert count_rows(worker, view, torch.arange(5)) == (5, people)


# What a site remembers --------------------------------------------------------------------------------------


def test_asked_twice_a_site_sends_the_same_reply_and_works_once(sites, monkeypatch):
    trained = []
    real = train_handler.train_client
    monkeypatch.setattr(train_handler, "train_client", lambda *a: trained.append(a[1]) or real(*a))

    class Twice(SiteGrid):
        def run_client(self, message):
            first, second = (super(Twice, self).run_client(message) for _ in range(2))
            if message.metadata.message_type == MessageType.TRAIN:
                assert dict(first.content["arrays"]) == dict(second.content["arrays"])
            return second

    once = sites.train(*ROUNDS, "run_id=once", folder="once")
    trained.clear()
    for name in sites.names:  # the same update once more gives nothing more away
        sites.change(name, "policy.yaml", rounds_per_day=6)
    twice = sites.train(*ROUNDS, "run_id=twice", folder="twice", make_grid=Twice)
    assert trained == ["north", "south", "west"] * 3
    assert same_bits(once.model, twice.model)
    log = [entry for entry in events(sites) if entry["event"] == "sent"]
    assert [(entry["round"], entry["again"]) for entry in log[3:]] == [
        (n, a) for n in (1, 2, 3) for a in (0, 1)
    ]
    logs = AuditLog(sites.kit("north").audit), sites.executors["north"].site.audit
    assert [log.today("sent") for log in logs] == [6, 6]


def test_an_update_that_was_kept_and_never_sent_counts_when_it_is(sites, monkeypatch):
    real = AuditLog.write

    def write(self, event, **details):
        if event == "sent" and not failed:
            failed.append(event)
            raise OSError("no room for the line")
        real(self, event, **details)

    class Twice(SiteGrid):
        def run_client(self, message):
            first = super().run_client(message)
            if message.metadata.message_type == MessageType.TRAIN and read_reply(first).declined:
                return super().run_client(message)
            return first

    failed: list[str] = []
    monkeypatch.setattr(AuditLog, "write", write)
    sites.train("num_rounds=1", "strategy.warmup_rounds=1", make_grid=Twice)
    assert [entry["event"] for entry in events(sites)] == ["hello", "failed", "sent"]
    assert sites.executors["north"].site.audit.today("sent") == 1


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        ("local", 1),
        pytest.param("local", 2, marks=pytest.mark.slow),
        pytest.param("fedfrozen", 1, marks=pytest.mark.slow),
        pytest.param("fedfrozen", 2, marks=pytest.mark.slow),
    ],
)
def test_private_state_survives_restarts_and_no_round_counts_twice(sites, strategy, every):
    """The server dies after round 3 and before its checkpoint; executors and SuperNodes start again."""
    words = (f"strategy={strategy}", "num_rounds=4", f"checkpoint.every={every}")
    whole = sites.train(*words, "run_id=whole", folder="whole")

    class Dies(SiteGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "4":
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        sites.train(*words, "run_id=broken", folder="broken", make_grid=Dies)
    if every == 1:  # as if the last checkpoint had not been written: round 3 is asked for again
        shutil.rmtree(sites.folder / "broken" / "checkpoints" / "3")
    broken = sites.train(*words, "run_id=broken", folder="broken", resume=True)
    assert same_bits(whole.model, broken.model)
    assert [row["round"] for row in broken.rows] == [0, 1, 2, 3, 4]
    if strategy == "local":  # at the end each site is judged on its own test rows, and keeps nothing of it
        assert len(json.loads((whole.folder / "personal.json").read_text())["clients"]) == 3
        assert not [*(sites.kit("north").var / "state" / "whole").glob("*/5")]
    for name in sites.names:
        runs = [sites.kit(name).var / "state" / run for run in ("whole", "broken")]
        kept = [folder for run in runs for folder in run.glob("*/4")]
        arrays = [
            sorted(folder.glob("*.safetensors"), key=lambda path: path.stem == "private") for folder in kept
        ]
        assert len(arrays[0]) == len(arrays[1]) > 0  # a reply has its proposal's hash as its name
        for one, other in zip(*arrays, strict=True):
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("strategy", ["local", pytest.param("fedfrozen", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_fork_says_that_sites_begin_their_private_parts_afresh(sites, caplog, strategy):
    words = (f"strategy={strategy}", "checkpoint.keep=9")
    told = ("a site without the executor begins them afresh", "the sites' private parts begin afresh")
    private = strategy == "local"

    def times():
        return [caplog.text.count(sentence) for sentence in told]

    sites.train(*words, "num_rounds=2", "run_id=origin", folder="origin")
    assert times() == [0, 0]
    sites.train(*words, "num_rounds=3", "run_id=origin", folder="origin", resume=True)
    assert times() == [private, 0]
    origin = sites.folder / "origin" / "checkpoints" / "2"
    # Without a run_id of ours, as plain `flwr run` starts it, nobody knows that it is the same run.
    for number, run_id in enumerate(("fork", "null"), start=1):
        sites.train(*words, "num_rounds=3", f"run_id={run_id}", f"from={origin}", folder=run_id)
        assert times() == [private, number * private]
    origin = sites.folder / "null" / "checkpoints" / "3"
    sites.train(*words, "num_rounds=4", "run_id=null", f"from={origin}", folder="again")
    assert times() == [private, 3 * private]


@pytest.mark.slow
def test_what_a_site_kept_is_not_shared_when_the_next_plan_keeps_another_part(sites):
    """The server's second order asks for the head that it let the sites keep in the first."""
    asked = {}

    class Turns(SiteGrid):
        def run_client(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                request, _ = train_handler.read_train(message)
                names = request.plan.trained
                kept = [name for name in names if ("classifier" in name) == (request.round == 1)]
                plan = Plan.full(names).keep_private(kept)
                base = {name: digest for name, digest in request.base.items() if name not in kept}
                request = replace(request, plan=plan, base=base)
                message.content["order"] = ConfigRecord({"json": request.json})
                asked[request.round] = plan
            return super().run_client(message)

    # The second round's learning rate is 0: what is sent is what the site began with.
    words = ("num_rounds=2", "strategy.warmup_rounds=2", "client.lr_schedule=linear", "client.lr_final=0")
    with pytest.raises(RuntimeError):
        sites.train(*words, make_grid=Turns)
    state = sites.kit("north").var / "state" / "test"
    assert asked[2].shared and set(asked[2].shared) == set(asked[1].private)
    (private,) = state.glob("*/1/private.safetensors")
    kept = load_file(private)
    (reply,) = (path for path in state.glob("*/2/*.safetensors") if path.stem != "private")
    sent = load_file(reply)
    assert sent and not any(torch.equal(kept[name], value) for name, value in sent.items())


@pytest.mark.slow
def test_a_supernode_that_forgot_the_hello_is_no_harm(sites):
    class Forgets(SiteGrid):
        def run_client(self, message):
            self.contexts[message.metadata.dst_node_id].state = RecordDict()
            return super().run_client(message)

    assert all(row["clients_failed"] == 0 for row in sites.train(*ROUNDS, make_grid=Forgets).rows[1:])


@pytest.mark.parametrize("size", [0, 300, 10_000], ids=["no room", "a little", "room for half a reply"])
@pytest.mark.slow
def test_a_site_whose_disk_is_full_sends_nothing_and_is_there_again_when_there_is_room(sites, size):
    class Full(SiteGrid):
        def run_client(self, message):
            if (message.metadata.group_id, message.metadata.dst_node_id) != ("2", 2):
                return super().run_client(message)
            with full_disk(size):
                return super().run_client(message)

    run = sites.train(*ROUNDS, make_grid=Full)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2, 3]
    assert run.rows[2]["failures"] == [f"Client south was set aside: it failed: {client_app.FAILED}."]
    south = sites.kit("south")
    assert [entry["round"] for entry in events(sites, "south") if entry["event"] == "sent"] == [1, 3]
    assert not [path for path in south.var.rglob("*") if path.name.endswith(".part")]


@pytest.mark.parametrize(
    ("size", "how"),
    [
        pytest.param(0, (), id="no room", marks=pytest.mark.slow),
        pytest.param(10_000, (), id="room for half a reply", marks=pytest.mark.slow),
        pytest.param(0, PRIVATE, id="no room, private", marks=pytest.mark.slow),
        pytest.param(10_000, PRIVATE, id="room for half a reply, private", marks=pytest.mark.slow),
    ],
)
def test_a_site_that_waits_for_room_loses_nothing(sites, size, how):
    waits = []

    class Full(SiteGrid):
        def run_client(self, message):
            if (message.metadata.group_id, message.metadata.dst_node_id) != ("2", 2):
                return super().run_client(message)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)

            def wait():
                waits.append(1)
                if len(waits) == 3:  # somebody has made room
                    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
                return True

            with full_disk(size), waiting_for_room(wait):
                return super().run_client(message)

    whole = sites.train(*ROUNDS, *how, "run_id=whole", folder="whole")
    run = sites.train(*ROUNDS, *how, "run_id=full", folder="full", make_grid=Full)
    assert len(waits) >= 3
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3, 3]
    sent = [entry for entry in events(sites, "south") if entry["event"] == "sent" and entry["run"] == "full"]
    assert [entry["round"] for entry in sent] == [1, 2, 3]
    if how:
        assert run.rows[-1]["epsilon"] == whole.rows[-1]["epsilon"]  # no round was paid for twice
    else:
        assert same_bits(run.model, whole.model)


# Epsilon ----------------------------------------------------------------------------------------------------


def private(epsilon, *overrides):
    """A run of one round that may cost this much."""
    return (
        "num_rounds=1",
        "strategy.warmup_rounds=1",
        "privacy=dp_sgd",
        f"privacy.epsilon={epsilon}",
        *overrides,
    )


def test_epsilon_is_spent_over_all_runs_and_then_refused(sites):
    for number in range(2):
        run = sites.train(*private(3, f"run_id=run{number}"), folder=f"run{number}")
        # The site's own account of this run, and the noise in what it sent: within what was asked for.
        assert all(0 < epsilon <= 3 for epsilon in run.rows[1]["epsilon"].values())
        assert [*(sites.kit("north").var / "state" / f"run{number}").glob("*/privacy/north.json")]
    reason = refused(sites, *private(3, "run_id=run2"), folder="run2")
    assert reason == "the run asks for epsilon 3, and 2 is left"
    sent = [entry for entry in events(sites) if entry["event"] == "sent"]
    assert [entry["epsilon_all_runs"] for entry in sent] == [3.0, 6.0]
    assert [entry["delta_all_runs"] for entry in sent] == pytest.approx([1e-5, 2e-5])
    assert [set(entry["metrics"]) for entry in sent] == [{"epsilon", "delta"}] * 2


@pytest.mark.slow
def test_delta_is_spent_over_all_runs_too(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", max_delta=2.5e-6)
    for number in range(2):
        words = private(1, f"run_id=run{number}", "privacy.delta=1e-6")
        sites.train(*words, folder=f"run{number}")
    reason = refused(sites, *private(1, "run_id=run2", "privacy.delta=1e-6"), folder="run2")
    assert reason == "the run asks for delta 1e-06, and 5e-07 is left"


@pytest.mark.slow
def test_what_is_charged_over_many_runs_bounds_what_they_cost_together(sites):
    """The steps that three runs really took, composed by dp-accounting, against the site's own sums."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    costs = (0.5, 1.0, 2.0)
    for number, epsilon in enumerate(costs):
        words = private(epsilon, f"run_id=run{number}", "privacy.delta=1e-6")
        sites.train(*words, folder=f"run{number}")
    kit = sites.kit("north")
    epsilon, delta = SiteBudget(kit.var / "state" / "budget.json").spent()
    assert (epsilon, delta) == (3.5, pytest.approx(3e-6))
    together = PLDAccountant()
    for number in range(len(costs)):
        (path,) = (kit.var / "state" / f"run{number}").glob("*/privacy/north.json")
        record = json.loads(path.read_text())
        for noise, rate, times in record["steps"]:
            step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
            together.compose(step, times)
    assert 0 < together.get_epsilon(delta) <= epsilon


def test_a_site_that_declines_sends_and_pays_nothing(sites, monkeypatch):
    reason = "declines: its privacy budget is spent"

    def declines(*args):
        yield from ()
        return Declined(reason)

    monkeypatch.setattr(train_handler, "train_privately", declines)
    assert refused(sites, *private(3)) == reason
    assert events(sites)[-1]["event"] == "declined"
    assert not (sites.kit("north").var / "state" / "budget.json").exists()


@pytest.mark.slow
def test_a_private_run_s_name_is_no_way_around_the_budget(sites):
    sites.train(*private(3))
    assert "began with other settings" in refused(sites, *private(3, "seed=1"), folder="again")

    # The same settings, but another base: the round was answered, and its noise is not drawn again.
    class Moved(SiteGrid):
        def run_client(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                request, _ = train_handler.read_train(message)
                base = dict(request.base)
                base[next(iter(base))] = "0" * 64
                message.content["order"] = ConfigRecord({"json": replace(request, base=base).json})
            return super().run_client(message)

    assert "was answered already" in refused(sites, *private(3), folder="moved", make_grid=Moved)


@pytest.mark.parametrize(
    ("policy", "words", "sentence"),
    [
        ({}, ["privacy.epsilon=9"], "asks for epsilon 9, and it gives 8 over all runs"),
        ({}, ["privacy.delta=1e-3"], "asks for delta 0.001, and it gives 0.0001"),
        ({}, ["privacy.unit=patient"], "speaks of epsilon per patient, and the view main is per example"),
        ({"max_delta": 1e-6}, [], "asks for delta 1e-05, and it gives 1e-06"),
        ({"privacy_required": True}, ["privacy.seeded_noise=true"], "private runs only"),
        ({"privacy_required": True}, ["privacy.selection=unaccounted"], "private runs only"),
    ],
)
def test_a_run_that_promises_too_little_gets_no_hello(sites, policy, words, sentence):
    sites.change("north", "policy.yaml", **policy)
    assert sentence in refused(sites, "privacy=dp_sgd", *words)


def test_what_is_left_can_be_spent_to_the_last_tenth(tmp_path):
    budget = SiteBudget(tmp_path / "budget.json")
    for number in range(3):  # 0.1 + 0.1 + 0.1 is more than 0.3 in floating point
        assert budget.problem(f"run{number}", TENTH, 0.3, 1.0) is None
        budget.charge(f"run{number}", TENTH, 1, "order", FIRST)
    assert budget.problem("run3", TENTH, 0.3, 1.0) == "the run asks for epsilon 0.1, and 0 is left"


TENTH = Price(0.1, 1e-6, "example", "a")


def test_nothing_is_left_for_the_smallest_run_when_all_is_spent(tmp_path):
    budget = SiteBudget(tmp_path / "budget.json")
    budget.charge("all", Price(1.0, 1e-6, "example", "h"), 1, "o", FIRST)
    for epsilon in (1e-3, 1e-6, 1e-9):
        small = Price(epsilon, 0.0, "example", "h2")
        for number in range(3):
            if budget.problem(f"more{number}", small, 1.0, 1e-6) is None:
                budget.charge(f"more{number}", small, 1, "o", FIRST)
    assert budget.spent()[0] <= 1.0 + 1.001e-9


@pytest.mark.slow
def test_a_private_run_whose_own_record_is_lost_is_no_fresh_start(sites):
    """The budget knows of rounds that were paid for: they would be paid for once, and taken twice."""
    words = ("privacy=dp_sgd", "privacy.epsilon=2", "num_rounds=2", "strategy.warmup_rounds=2")

    class Forgetful(SiteGrid):
        def run_client(self, message):
            if message.metadata.group_id == "2":
                for path in (sites.kit("north").var / "state" / "test").glob("*/privacy"):
                    shutil.rmtree(path)
                for context in self.contexts.values():  # Flower's memory ends with its process
                    context.state.clear()
            return super().run_client(message)

    run = sites.train(*words, make_grid=Forgetful)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2]
    assert [entry["event"] for entry in events(sites)] == ["hello", "sent", "failed"]


def test_a_damaged_budget_ends_all_work(tmp_path):
    budget = SiteBudget(tmp_path / "budget.json")
    budget.charge("one", TENTH, 1, "order", FIRST)
    budget.path.write_text(budget.path.read_text()[:-5])
    with pytest.raises(UserError, match="is damaged"):
        budget.problem("two", TENTH, 8.0, 1.0)


def test_units_do_not_add_up_with_each_other(tmp_path):
    budget = SiteBudget(tmp_path / "budget.json")
    budget.charge("one", Price(1.0, 1e-6, "document", "a"), 1, "order", FIRST)
    problem = budget.problem("two", Price(1.0, 1e-6, "patient", "b"), 8.0, 1.0)
    assert problem == "its budget is spent per document, which does not add up with epsilon per patient"


def test_a_budget_of_before_counts(tmp_path):
    """Earlier records knew neither delta nor unit: what they spent stays spent, at the usual delta."""
    budget = SiteBudget(tmp_path / "budget.json")
    runs = {"old": {"epsilon": 5.0, "overrides": "x", "rounds": {"1": "order"}}}
    budget.path.write_text(sealed({"runs": runs}))
    assert budget.spent() == (5.0, 1e-5)
    assert "and 3 is left" in budget.problem("new", Price(4.0, 1e-6, "patient", "b"), 8.0, 1.0)
    assert "began with other settings" in budget.problem("old", Price(5.0, 1e-5, "example", "b"), 8.0, 1.0)


@pytest.mark.parametrize("harm", ["budget lost", *slowly("budget of an earlier day", "log lost", "log cut")])
def test_a_site_whose_two_records_contradict_each_other_answers_nothing(sites, harm):
    budget, log = (sites.kit("north").var / name for name in ("state/budget.json", "audit.jsonl"))
    sites.train(*private(1, "run_id=first"), folder="first")
    before = budget.read_bytes()
    sites.train(*private(1, "run_id=second"), folder="second")
    running = sites.executors["north"]
    if harm == "budget lost":
        budget.unlink()
    elif harm == "budget of an earlier day":
        budget.write_bytes(before)
    elif harm == "log lost":
        log.unlink()
    else:
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="Until then this site answers nothing"):
        sites.restart()
    if harm.startswith("budget"):  # the process that runs already looks too
        reply = running.handle(Message(RecordDict(), dst_node_id=1, message_type="query"), Blank(), BUNDLE)
        assert json.loads(reply.content["hello"]["json"])["state"] == "refused"


class Blank:
    """Flower's context, as far as a refusal looks at it."""

    run_id = 1


# The audit log ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["changed", "last one changed", "removed", "cut"])
def test_an_audit_log_that_was_tampered_with_shows(tmp_path, harm):
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(4):
        log.write("sent", round=number)
    AuditLog(log.path).write("refused", reason="again, by a new process")
    assert [entry["event"] for entry in read_audit(log.path)] == ["sent"] * 4 + ["refused"]
    lines = log.path.read_text().splitlines(keepends=True)
    if harm == "changed":
        lines[1] = lines[1].replace('"round": 1', '"round": 7')
    elif harm == "last one changed":
        lines[-1] = lines[-1].replace("again", "never")
    elif harm == "removed":
        del lines[2]
    else:
        lines[-1] = lines[-1][:30]
    log.path.write_text("".join(lines))
    with pytest.raises(UserError, match="was changed or cut"):
        read_audit(log.path)


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("sent", round=1)
    before = log.path.read_bytes()
    with full_disk(len(before) + 50), pytest.raises(OSError, match="No space left"):
        log.write("sent", round=2)
    assert log.path.read_bytes() == before
    log.write("sent", round=3)
    assert [entry["round"] for entry in read_audit(log.path)] == [1, 3] and log.today("sent") == 2


def test_a_copy_of_every_entry_goes_to_syslog(tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(5)
        log = AuditLog(tmp_path / "audit.jsonl", f"127.0.0.1:{listener.getsockname()[1]}")
        log.write("refused", reason="no")
        assert log.head in listener.recv(4096).decode()
    with pytest.raises(UserError, match="neither a socket such as /dev/log nor HOST:PORT"):
        AuditLog(tmp_path / "audit.jsonl", "nowhere")


def test_the_log_is_json_lines_with_a_mode_of_its_own(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("sent", arrays={"a": "b"})
    assert json.loads(log.path.read_text())["arrays"] == {"a": "b"}
    assert log.path.stat().st_mode & 0o077 == 0
    assert log.today("sent") == 1 and torch.get_num_threads() == 1


# Requests that are lost -------------------------------------------------------------------------------------


class Loses(SiteGrid):
    """The first order of the second round dies with the SuperNode of the site north, which is back at once:
    nobody ever answers it, and nobody says that it is gone."""

    lost: str | None = None
    requests = 0

    def push_messages(self, messages):
        messages = list(messages)
        self.requests += sum(message.metadata.message_type == MessageType.TRAIN for message in messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        about = self.waiting[message_id].metadata
        if (about.message_type, about.group_id, about.dst_node_id) == (MessageType.TRAIN, "2", 1):
            self.lost = self.lost or message_id
            if message_id == self.lost:
                return []
        return super().pull_messages(message_ids)


class Busy(Loses):
    """The site north trains for long, and answers no question meanwhile."""

    polls = 0

    def pull_messages(self, message_ids):
        about = self.waiting[message_ids[0]].metadata
        if about.dst_node_id == 1 and about.group_id in ("2", ""):
            self.polls += about.group_id == "2"
            if self.polls and (about.group_id == "" or self.polls < 30):
                return []
        return SiteGrid.pull_messages(self, message_ids)


@pytest.mark.parametrize(
    ("make_grid", "requests"), [(Loses, 3 * 3 + 1), pytest.param(Busy, 3 * 3, marks=pytest.mark.slow)]
)
def test_an_order_that_was_lost_is_sent_again_and_one_in_work_is_not(sites, monkeypatch, make_grid, requests):
    monkeypatch.setattr("fedfrozen_app.server.transport.ALIVE_FIRST", 0.02)
    grids = []

    def make(executors, bundle):
        grids.append(make_grid(executors, bundle))
        return grids[0]

    whole = sites.train(*ROUNDS, folder="whole")
    run = sites.train(*ROUNDS, "run_id=again", make_grid=make)
    assert grids[0].requests == requests
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3, 3]
    assert same_bits(run.model, whole.model)
    rounds = [e["round"] for e in events(sites) if e["event"] == "sent" and e["run"] == "again"]
    assert rounds == [1, 2, 3]
    assert not [e for e in events(sites) if e["event"] in ("refused", "failed")]
