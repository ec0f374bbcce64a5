"""A site keeps the last word: what its executor answers, refuses, remembers and writes down."""

import json
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from safetensors.torch import load_file

from fedfrozen_app import client_app
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.privacy.budget import Declined
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.sites import executor
from fedfrozen_app.sites.audit_log import AuditLog, read_audit
from fedfrozen_app.sites.executor import alone
from fedfrozen_app.sites.executor import main as executor_of
from fedfrozen_app.sites.policy import Policy, read_run
from fedfrozen_app.sites.store import Budget
from tests.conftest import full_disk, same_bits
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites

NO_KERNEL = ["embedding", "value", "output", "mlp", "norm", "head"]
ROUNDS = ("num_rounds=3", "strategy.warmup_rounds=2")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    Sites(folder).prepare()
    return folder


@pytest.fixture
def sites(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    shutil.copytree(prepared, tmp_path / "sites")
    return Sites(tmp_path / "sites")


def events(sites, name="north"):
    return read_audit(sites.kit(name).audit)


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
    assert "path" not in log[0]["overrides"].replace("dataset.path=null", "").replace("cache", "")


@pytest.mark.parametrize(
    ("policy", "overrides", "sentence"),
    [
        ({"strategies": ["fedavg"]}, (), "the strategy fedfrozen is not one of those"),
        ({"bundles": ["0" * 64]}, (), "the bundle bbbbbbbbbbbb is not one of those"),
        ({"privacy_required": True}, (), "private runs only"),
        ({}, ("dataset=digits",), "of the kind images, not digits"),
        ({}, ("model.source=hub", "model.path=some/model"), "it downloads nothing"),
    ],
)
def test_a_run_that_the_policy_forbids_gets_no_hello(sites, policy, overrides, sentence):
    for name in sites.names:
        sites.change(name, "policy.yaml", **policy)
    with pytest.raises(UserError, match=sentence):
        sites_told(sites, *overrides)
    assert {entry["event"] for entry in events(sites)} == {"refused"}
    assert sentence in events(sites)[-1]["reason"]


def sites_told(sites, *overrides):
    """Ask the sites for a hello, with settings that the server's own machine need not be able to read."""
    sites.restart()
    words = [word for word in sites.words() if not word.startswith("dataset.path")]
    grid = SiteGrid(sites.executors, [*words, *overrides])
    Conversation(grid, {}, card={"classes": [], "mean": [0], "std": [1]}, hello_timeout=1).wait_for(3, 0.1)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("dataset.path=/etc", "names a path (dataset.path)"),
        ("dataset.train_split=/etc", "names a path (dataset.train_split)"),
        ("dataset.test_split=/etc", "names a path (dataset.test_split)"),
        ("from=/etc", "names a path (from)"),
        ("runtime.cache_dir=/etc", "names a path (runtime.cache_dir)"),
        ("model.source=checkpoint model.path=/etc", "names a path (model.path)"),
        ("seed=${oc.env:HOME}", "outside itself"),
        ("experiment=../../../etc/passwd", "outside itself"),
        ("hydra.searchpath=[file:///etc]", "how configurations are read"),
        ("+hydra.x=1", "how configurations are read"),
        ("num_rounds=none", "cannot be read"),
        ("'unclosed", "cannot be read"),
        ("run_id=../x", "outside itself"),
        ("run_id=A/B", "run_id is none"),
    ],
)
def test_the_server_can_name_no_path_and_no_secret(word, sentence):
    found = read_run(f"dataset=images {word}", 7, BUNDLE)
    assert isinstance(found, str) and sentence in found
    assert "/etc" not in found


@pytest.mark.parametrize(
    ("policy", "overrides", "sentence"),
    [
        ({"upload_roles": ["value", "output", "mlp", "norm", "head"]}, (), "asks for embedding parameters"),
        (
            {"upload_roles": ["embedding", "value", "output", "mlp", "norm", "head"]},
            (),
            "asks for key parameters",
        ),
        ({"min_examples": 1000}, (), "fewer than 1000 examples"),
        ({"min_examples": 50}, ("client.local_steps=1",), "fewer than 50 examples"),
        ({"rounds_per_day": 0}, (), "sent 0 updates in 24 hours"),
    ],
)
def test_an_order_that_one_site_forbids_goes_on_without_it(sites, policy, overrides, sentence):
    sites.change("south", "policy.yaml", **policy)
    run = sites.train("num_rounds=1", "strategy.warmup_rounds=1", *overrides)
    assert run.rows[1]["clients_ok"] == 2
    (failure,) = run.rows[1]["failures"]
    assert "the site south refused, because" in failure and sentence in failure
    assert [entry["event"] for entry in events(sites, "south")] == ["hello", "refused"]


def test_after_the_switch_a_site_that_keeps_its_kernel_takes_part(sites):
    sites.change("south", "policy.yaml", upload_roles=NO_KERNEL)
    run = sites.train("num_rounds=2", "strategy.warmup_rounds=1")
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda order: replace(order, algorithm="fedprox"), "the algorithm fedprox"),
        (lambda order: replace(order, round=9), "round 9 of 1"),
        (lambda order: replace(order, round=0.5 + order.round / 2), "round 1.0 of 1"),
        (lambda order: replace(order, plan=Plan.full([*order.plan.trained, "spy"])), "names spy"),
        (lambda order: replace(order, base=dict.fromkeys(order.base, "../../model")), "that is no digest"),
        # Otherwise these would be whatever the site's model held before: nobody's values.
        (lambda order: without_a_frozen_name(order), "does not say what vit.embeddings.cls_token is to be"),
        (lambda order: as_judgement(without_a_frozen_name(order)), "what vit.embeddings.cls_token is to be"),
    ],
)
def test_an_order_of_another_kind_is_refused(sites, change, sentence):
    class Changed(SiteGrid):
        def _answer(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                order, _ = client_app.read_train(message)
                message.content["order"] = ConfigRecord({"json": change(order).json})
            return super()._answer(message)

    with pytest.raises(RuntimeError, match=sentence):
        sites.train("num_rounds=1", "strategy.warmup_rounds=1", folder="changed", make_grid=Changed)
    assert sentence in events(sites)[-1]["reason"]


def without_a_frozen_name(order):
    name = "vit.embeddings.cls_token"
    base = {key: value for key, value in order.base.items() if key != name}
    return replace(order, plan=order.plan.freeze([name]), base=base)


def as_judgement(order):
    return replace(order, plan=replace(order.plan, shared=()), judge=True)


def test_other_messages_are_refused(sites):
    sites.restart()
    grid = SiteGrid(sites.executors, [w for w in sites.words() if not w.startswith("dataset.path")])
    message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.EVALUATE)
    reply = grid._answer(message)
    assert "knows no evaluate messages" in reply.error.reason


def test_an_exception_on_a_site_stays_there(sites, monkeypatch):
    def fail(*args):
        raise RuntimeError("patient Mustermann in /data/patients.csv")

    monkeypatch.setattr(client_app, "train_client", fail)
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
        def _answer(self, message):
            path.write_text("strategies: [" if message.metadata.message_type == MessageType.TRAIN else good)
            return super()._answer(message)

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
    path.write_text(line + path.read_text())
    with pytest.raises(UserError, match=sentence):
        Policy.read(path)


def test_a_kit_has_one_executor_at_a_time(sites):
    kit = sites.kit("north")
    with alone(kit), pytest.raises(UserError, match="is running already"):
        executor_of([str(kit.folder)])
    (kit.folder / "executor.secret").unlink()
    with pytest.raises(UserError, match=r"executor\.secret is missing"):  # the first is gone: this one starts
        executor_of([str(kit.folder)])


@pytest.mark.parametrize("there", [True, False], ids=["another secret", "first nobody, then another secret"])
def test_a_supernode_with_another_secret_is_a_sentence(sites, monkeypatch, caplog, there):
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_error(401, "SuperExec authentication failed")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses, bind_and_activate=False)
    server.server_bind()
    sites.change("north", "site.yaml", port=server.server_port)

    def answer():
        server.server_activate()
        server.serve_forever()

    threading.Timer(0.0 if there else 1.0, answer).start()
    monkeypatch.setattr(executor, "PATIENCE", 0.1)
    with pytest.raises(UserError, match=r"has another executor\.secret"):
        executor_of([str(sites.kit("north").folder)])
    assert there or "No SuperNode answers" in caplog.text
    server.shutdown()
    server.server_close()


# What a site remembers --------------------------------------------------------------------------------------


def test_asked_twice_a_site_sends_the_same_reply_and_works_once(sites, monkeypatch):
    trained = []
    real = client_app.train_client
    monkeypatch.setattr(client_app, "train_client", lambda *a: trained.append(a[1]) or real(*a))

    class Twice(SiteGrid):
        def _answer(self, message):
            first, second = (super(Twice, self)._answer(message) for _ in range(2))
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
    assert AuditLog(sites.kit("north").audit).sent_today() == sites.executors["north"].audit.sent_today() == 6


def test_an_update_that_was_kept_and_never_sent_counts_when_it_is(sites, monkeypatch):
    real = AuditLog.write

    def write(self, event, **details):
        if event == "sent" and not failed:
            failed.append(event)
            raise OSError("no room for the line")
        real(self, event, **details)

    class Twice(SiteGrid):
        def _answer(self, message):
            first = super()._answer(message)
            return super()._answer(message) if first.has_error() else first

    failed: list[str] = []
    monkeypatch.setattr(AuditLog, "write", write)
    sites.train("num_rounds=1", "strategy.warmup_rounds=1", make_grid=Twice)
    assert [entry["event"] for entry in events(sites)] == ["hello", "failed", "sent"]
    assert sites.executors["north"].audit.sent_today() == 1


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        ("local", 1),
        pytest.param("local", 2, marks=pytest.mark.slow),
        pytest.param("fedfrozen", 1, marks=pytest.mark.slow),
        ("fedfrozen", 2),
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
        assert not (sites.kit("north").var / "state" / "whole" / "5").exists()
    for name in sites.names:
        kept = [sites.kit(name).var / "state" / run / "4" for run in ("whole", "broken")]
        for file in ("private.safetensors", "reply.safetensors"):
            both = [folder / file for folder in kept]
            assert both[0].exists() == both[1].exists()
            assert not both[0].exists() or both[0].read_bytes() == both[1].read_bytes()


@pytest.mark.parametrize("strategy", ["local", pytest.param("fedfrozen", marks=pytest.mark.slow)])
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


def test_what_a_site_kept_is_not_shared_when_the_next_plan_keeps_another_part(sites):
    """The server's second order asks for the head that it let the sites keep in the first."""
    asked = {}

    class Turns(SiteGrid):
        def _answer(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                order, _ = client_app.read_train(message)
                names = order.plan.trained
                kept = [name for name in names if ("classifier" in name) == (order.round == 1)]
                plan = Plan.full(names).keep_private(kept)
                order = replace(order, plan=plan)
                message.content["order"] = ConfigRecord({"json": order.json})
                asked[order.round] = plan
            return super()._answer(message)

    # The second round's learning rate is 0: what is sent is what the site began with.
    words = ("num_rounds=2", "strategy.warmup_rounds=2", "client.lr_schedule=linear", "client.lr_final=0")
    with pytest.raises(RuntimeError):
        sites.train(*words, make_grid=Turns)
    state = sites.kit("north").var / "state" / "test"
    assert asked[2].shared and set(asked[2].shared) == set(asked[1].private)
    kept = load_file(state / "1" / "private.safetensors")
    sent = load_file(state / "2" / "reply.safetensors")
    assert sent and not any(torch.equal(kept[name], value) for name, value in sent.items())


def test_a_supernode_that_forgot_the_hello_is_no_harm(sites):
    class Forgets(SiteGrid):
        def _answer(self, message):
            self.contexts[message.metadata.dst_node_id].state = RecordDict()
            return super()._answer(message)

    assert all(row["clients_failed"] == 0 for row in sites.train(*ROUNDS, make_grid=Forgets).rows[1:])


@pytest.mark.parametrize("size", [0, 300, 10_000], ids=["no room", "a little", "room for half a reply"])
def test_a_site_whose_disk_is_full_sends_nothing_and_is_there_again_when_there_is_room(sites, size):
    class Full(SiteGrid):
        def _answer(self, message):
            if (message.metadata.group_id, message.metadata.dst_node_id) != ("2", 2):
                return super()._answer(message)
            with full_disk(size):
                return super()._answer(message)

    run = sites.train(*ROUNDS, make_grid=Full)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2, 3]
    assert run.rows[2]["failures"] == [f"Client south was set aside: it failed: {client_app.FAILED}."]
    south = sites.kit("south")
    assert [entry["round"] for entry in events(sites, "south") if entry["event"] == "sent"] == [1, 3]
    assert not [path for path in south.var.rglob("*") if path.name.endswith(".part")]


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
        assert (sites.kit("north").var / "state" / f"run{number}" / "privacy" / "north.json").exists()
    with pytest.raises(RuntimeError, match="asks for epsilon 3, and 2 is left"):
        sites.train(*private(3, "run_id=run2"), folder="run2")
    log = events(sites)
    assert [entry["epsilon_all_runs"] for entry in log if entry["event"] == "sent"] == [3.0, 6.0]
    assert log[-1]["event"] == "refused" and "epsilon" in log[-1]["reason"]


def test_a_site_that_declines_sends_and_pays_nothing(sites, monkeypatch):
    reason = "declines: its privacy budget is spent"
    monkeypatch.setattr(client_app, "train_privately", lambda *args: Declined(reason))
    with pytest.raises(RuntimeError, match=reason):
        sites.train(*private(3))
    log = events(sites)
    assert log[-1]["event"] == "declined" and log[-1]["reason"] == reason
    assert not (sites.kit("north").var / "state" / "budget.json").exists()


def test_a_private_run_s_name_is_no_way_around_the_budget(sites):
    sites.train(*private(3))
    with pytest.raises(RuntimeError, match="began with other settings"):
        sites.train(*private(3, "seed=1"), folder="again")

    # The same settings, but another base: the round was answered, and its noise is not drawn again.
    class Moved(SiteGrid):
        def _answer(self, message):
            if message.metadata.message_type == MessageType.TRAIN:
                order, _ = client_app.read_train(message)
                base = dict(order.base)
                base[next(iter(base))] = "0" * 64
                message.content["order"] = ConfigRecord({"json": replace(order, base=base).json})
            return super()._answer(message)

    with pytest.raises(RuntimeError, match="was answered already"):
        sites.train(*private(3), folder="moved", make_grid=Moved)


@pytest.mark.parametrize(
    ("policy", "words", "sentence"),
    [
        ({}, ["privacy.epsilon=9"], "asks for epsilon 9, and it gives 8 over all runs"),
        ({}, ["privacy.delta=1e-3"], "asks for delta 0.001, and it gives 1e-05"),
        ({"max_delta": 1e-6}, [], "asks for delta 1e-05, and it gives 1e-06"),
        ({"privacy_required": True}, ["privacy.seeded_noise=true"], "private runs only"),
        ({"privacy_required": True}, ["privacy.selection=unaccounted"], "private runs only"),
    ],
)
def test_a_run_that_promises_too_little_gets_no_hello(sites, policy, words, sentence):
    sites.change("north", "policy.yaml", **policy)
    with pytest.raises(UserError, match=sentence):
        sites_told(sites, "privacy=dp_sgd", *words)


def test_what_is_left_can_be_spent_to_the_last_tenth(tmp_path):
    budget = Budget(tmp_path / "budget.json")
    for number in range(3):  # 0.1 + 0.1 + 0.1 is more than 0.3 in floating point
        assert budget.problem(f"run{number}", 0.1, "a", 0.3) is None
        budget.charge(f"run{number}", 0.1, "a", 1, "order")
    assert budget.problem("run3", 0.1, "a", 0.3) == "the run asks for epsilon 0.1, and 0 is left"


def test_a_damaged_budget_ends_all_work(tmp_path):
    budget = Budget(tmp_path / "budget.json")
    budget.charge("one", 2.0, "a", 1, "order")
    budget.path.write_text(budget.path.read_text()[:-5])
    with pytest.raises(UserError, match="is damaged"):
        budget.problem("two", 1.0, "a", 8.0)


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
    assert [entry["round"] for entry in read_audit(log.path)] == [1, 3] and log.sent_today() == 2


def test_the_log_is_json_lines_with_a_mode_of_its_own(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("sent", arrays={"a": "b"})
    assert json.loads(log.path.read_text())["arrays"] == {"a": "b"}
    assert log.path.stat().st_mode & 0o077 == 0
    assert log.sent_today() == 1 and torch.get_num_threads() == 1
