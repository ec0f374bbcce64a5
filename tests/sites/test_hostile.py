"""A server that wants more than it may have: every attack gets the one refusal, with nothing of the site.

`pytest -m slow tests/sites/test_hostile.py` tries 20,000 proposals; the default suite a few hundred.
"""

import copy
import datetime
import json
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfrozen_app import client_app
from fedfrozen_app.config import ClientConfig, Config, PrivacyConfig, compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.exchange.messages import ticket_of
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.plan import Phase, Plan
from fedfrozen_app.exchange.proposal import propose, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.batches import batches, drawn_rows
from fedfrozen_app.sites import accepted, check_train, handle_hello
from fedfrozen_app.sites.audit_log import _digest, read_audit
from fedfrozen_app.sites.check_train import problem_of_limits
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.row_counts import count_rows, fewest, rows_by_phase
from fedfrozen_app.sites.store import RunStore
from tests.sites.federation import VIEWS
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites, copy_of

SECRET = "the-secret-of-this-site"
ROLES = ("embedding", "query", "key", "value", "output", "mlp", "norm", "head")
CARD = {"classes": [str(digit) for digit in range(10)], "mean": [0.3], "std": [0.3]}
ROUND = ("num_rounds=1", "strategy.warmup_rounds=1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    sites = Sites(folder, names=("north",))
    sites.prepare()
    (folder / "secret.yaml").write_text(f"kind: {SECRET}\n")
    return folder


@pytest.fixture
def sites(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    monkeypatch.setenv("SECRET", SECRET)
    copy_of(prepared, tmp_path / "sites")
    found = Sites(tmp_path / "sites", names=("north",))
    found.restart()
    SiteGrid(found.executors)  # Flower lets messages be made where a run is known
    return found


@pytest.fixture(scope="module")
def one(prepared, tmp_path_factory):
    """One site for all attacks that change nothing there."""
    folder = tmp_path_factory.mktemp("one") / "sites"
    copy_of(prepared, folder)
    found = Sites(folder, names=("north",))
    found.change("north", "policy.yaml", refusals_per_day=10**6)
    found.restart()
    SiteGrid(found.executors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", SECRET)
        assert ask(found, canonical(proposed()))["state"] == ""  # what is imported once is imported now
        shutil.rmtree(found.kit("north").var / "state")
        yield found


def proposed(*overrides: str) -> dict:
    """What an honest server would send, as plain values."""
    return copy.deepcopy(_proposed(*overrides))


@cache
def _proposed(*overrides: str) -> dict:
    words = [*Sites.settings, "run_id=test", *overrides]
    return propose(read(resolved(compose_config(words))), CARD, "test", ROLES).plain


def ask(sites: Sites, text: object, bundle: str = BUNDLE) -> dict:
    """The site's answer to a hello with this proposal, as it travels."""
    content = RecordDict({"hello": ConfigRecord({"card": json.dumps(CARD), "proposal": text})})
    message = Message(content, dst_node_id=1, message_type=MessageType.QUERY)
    return json.loads(
        str(sites.executors["north"].handle(message, context(), bundle).content["hello"]["json"])
    )


def context() -> Context:
    # Whatever overrides a server hands to Flower: nobody here reads them.
    told = {"overrides": "dataset.kind='$'{oc.env:SECRET} 'hydra.searchpath=[file:///etc]' dataset.path=/etc"}
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=told)


def refused(answer: dict) -> bool:
    """The one refusal: the site's name, which the server knows, and the head of its audit log."""
    assert re.fullmatch("[0-9a-f]{64}", answer.pop("anchor"))
    return answer == {"name": "north", "num_partitions": None, "held": [], "state": "refused"}


def put(path: str, value: object):
    def change(plain: dict) -> None:
        *places, last = path.split("/")
        for place in places:
            plain = plain[place]
        plain[last] = value

    return change


def test_an_honest_proposal_is_taken(sites):
    answer = ask(sites, canonical(proposed()))
    assert answer["state"] == "" and answer["name"] == "north"
    kept = sites.kit("north").var / "state" / "test" / "proposal.json"
    assert read_proposal(kept.read_text()).plain == proposed()


def test_the_keys_of_a_proposal():
    """A new setting of a client or of privacy reaches every site: it must be wanted here as well."""
    plain = proposed()
    assert set(plain) == {"format", "run", "data", "strategy", "model", "client", "privacy"}
    assert set(plain["run"]) == {"id", "num_rounds", "eval_every", "seed", "threads", "keep_rounds", "roles"}
    assert set(plain["data"]) == {"view", "classes", "mean", "std", "more"}
    assert set(plain["model"]) == {"source", "model_type", "dtype", "config"}
    assert set(plain["client"]) == set(ClientConfig.__dataclass_fields__)
    assert {one.name for one in fields(PrivacyConfig)} - set(plain["privacy"]) == {"unit_column", "examples"}
    assert not any(
        "path" in key or "column" in key for part in plain.values() if isinstance(part, dict) for key in part
    )


ATTACKS = {
    # Configuration as code.
    "an environment variable": put("strategy/name", "${oc.env:SECRET}"),
    "the same, in quotes": put("strategy/name", "'$'{oc.env:SECRET}"),
    "the same, in a setting": put("strategy/warmup_rounds", "${oc.env:SECRET}"),
    "the same, in the data": put("data/view", "${oc.env:SECRET}"),
    "the same, in a key": put("strategy/${oc.env:SECRET}", 1),
    "the same, with a wide dollar": put("strategy/warmup_rounds", "＄{oc.env:SECRET}"),
    "a resolver of ours": put("strategy/warmup_rounds", "${run_folder:a,b}"),
    "a search path": put("hydra", {"searchpath": ["file:///etc"]}),
    "a search path in a section": put("run/hydra.searchpath", ["file:///etc"]),
    "a defaults list": put("defaults", ["../../etc/passwd"]),
    "a target to be made": put("strategy/_target_", "os.system"),
    "a module": put("strategy/name", "os:system"),
    # Paths.
    "a path": put("data/path", "/etc"),
    "a split above": put("data/train_split", "../../other"),
    "a split above, quoted": put("data/train_split", ".''./.''./other"),
    "a view that is a path": put("data/view", "../../other"),
    "a view that is a file": put("data/view", "/etc/passwd"),
    "a cache": put("run/cache_dir", "/etc"),
    "a run that is a path": put("run/id", "../x"),
    "a run that is absolute": put("run/id", "/etc"),
    "a run in capitals": put("run/id", "Test"),
    "a run with a line end": put("run/id", "test\n"),
    "a run of nothing": put("run/id", ""),
    "a model's path": put("model/path", "/etc"),
    # Rows, columns, classes, units.
    "a label column": put("data/label_column", "patient"),
    "some classes": put("data/keep_classes", ["1"]),
    "fewer classes": put("data/classes", ["0", "1"]),
    "one class more": put("data/classes", [*CARD["classes"], "10"]),
    # What the view's classes are held against must be what trains: with `top_labels` it chooses rows.
    "other classes beside the classes": put("data/more", {"classes": "01"}),
    "another mean beside the mean": put("data/more", {"mean": "0"}),
    "a reading of texts beside the texts": put("data/more", {"text": "0"}),
    "a table's columns": put("data/more", {"table": "patient"}),
    "a target's settings": put("data/more", {"target": "0"}),
    "a class that looks like another": put("data/classes", [*CARD["classes"][:-1], "９"]),
    "a class twice": put("data/classes", [*CARD["classes"], "9"]),
    "a limit": put("data/limit", 1),
    "another view": put("data/view", "others"),
    "a view that looks like ours": put("data/view", "mаin"),
    "a unit column": put("privacy/unit_column", "note_id"),
    "another unit": lambda plain: plain["privacy"].update(name="dp_sgd", unit="patient"),
    "a number of examples": put("privacy/examples", 1),
    "an odd column name": put("data/__class__", "x"),
    # Downloads.
    "a kernel of the hub": put("model/config/attn_implementation", "kernels-community/flash-attn"),
    "the same, privately": put("model/config/_attn_implementation", "kernels-community/flash-attn"),
    "a model of the hub": put("model/source", "hub"),
    "a model made here": put("model/source", "aligned"),
    "a name of the hub": put("model/config/name_or_path", "org/model"),
    "remote code": put("model/config/auto_map", {"AutoConfig": "org/repo--x.Y"}),
    "an activation of the hub": put("model/config/hidden_act", "org/kernel:gelu"),
    "a model type of the hub": put("model/model_type", "org/model"),
    # Numbers.
    "less noise than said": put("privacy/epsilon", 1e30),
    "a negative epsilon": put("privacy/epsilon", -1),
    # In float32 its clipped gradients come out up to twice as long, and the noise is made for the bound.
    "a bound below all digits": put("privacy/max_grad_norm", 1e-44),
    "a bound above all digits": put("privacy/max_grad_norm", 1e38),
    "a word for a number": put("client/batch_size", "16"),
    "true for a number": put("client/batch_size", True),
    "half a round": put("run/num_rounds", 1.5),
    "a fraction of a batch": put("client/batch_size", 0.5),
    "no rounds at all": put("run/num_rounds", None),
    "a key of nobody's": put("client/seed", 1),
    "no client": lambda plain: plain.pop("client"),
    "a section that is a list": put("client", []),
    "another format": put("format", 2),
    "a format that is true": put("format", True),
    # Words.
    "an unknown strategy": put("strategy/name", "unheard-of"),
    "a strategy that is not allowed": put("strategy", {"name": "fedavg"}),
    "a strategy that looks like ours": put("strategy/name", "fedfrоzen"),
    "a setting that the strategy lacks": put("strategy/mu", 1.0),
    "a word with a path": put("strategy/warmup_rounds", "/etc/passwd"),
    "a word with a backslash": put("strategy/warmup_rounds", "a\\b"),
    "a word with a null": put("strategy/warmup_rounds", "auto\x00"),
    "roles of nobody's": put("run/roles", ["../x"]),
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_by_proposal_gets_the_one_refusal(one, name):
    plain = proposed()
    ATTACKS[name](plain)
    with watched(one) as seen:
        answer = ask(one, json.dumps(plain))
    assert refused(answer) and not seen
    last = read_audit(one.kit("north").audit)[-1]
    assert last["event"] == "refused" and SECRET not in json.dumps(last)
    assert not (one.kit("north").var / "state").exists()


GOOD = canonical(proposed())
TEXTS = {
    "nothing": "",
    "no JSON": "{",
    "words of Hydra": "strategy=fedfrozen dataset.path=/etc",
    "a list": "[]",
    "a number": "1",
    "a key twice": GOOD.replace('"format":1', '"format":1,"format":1'),
    "a key twice, within": GOOD.replace('"epsilon":8.0', '"epsilon":8.0,"epsilon":0.01'),
    "a key twice, spelled otherwise": GOOD.replace('"epsilon":8.0', '"epsilon":8.0,"\\u0065psilon":0.01'),
    "NaN": GOOD.replace('"epsilon":8.0', '"epsilon":NaN'),
    "Infinity": GOOD.replace('"epsilon":8.0', '"epsilon":Infinity'),
    "minus Infinity": GOOD.replace('"epsilon":8.0', '"epsilon":-Infinity'),
    "a float beyond floats": GOOD.replace('"epsilon":8.0', '"epsilon":1e999'),
    "an integer beyond all": GOOD.replace('"seed":0', '"seed":' + "9" * 5000),
    "an integer beyond 2**53": GOOD.replace('"seed":0', f'"seed":{2**53 + 1}'),
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "deep within": GOOD.replace('"warmup_rounds":null', '"warmup_rounds":' + "[" * 90 + "]" * 90),
    "huge": GOOD + " " * 2_000_000,
    "a huge text": GOOD.replace('"test"', '"' + "a" * 100_000 + '"'),
    "half a character": GOOD.replace('"view":null', '"view":"\\ud800"'),
    "a null character": GOOD.replace('"view":null', '"view":"main\\u0000"'),
    "two documents": GOOD + GOOD,
    "a mark of bytes first": "\ufeff" + GOOD,
    "an open text": GOOD[:-20] + '"',
}


@pytest.mark.parametrize("name", list(TEXTS))
def test_what_is_no_proposal_gets_the_one_refusal(one, name):
    assert TEXTS[name] != GOOD
    with watched(one) as seen:
        assert refused(ask(one, TEXTS[name])) and not seen
    assert read_audit(one.kit("north").audit)[-1]["event"] == "refused"


@pytest.mark.parametrize("value", [5, 1.5, True, b"x", ["a"]])
def test_a_proposal_that_is_no_text_gets_the_one_refusal(one, value):
    assert refused(ask(one, value))


def test_the_same_values_have_the_same_hash_however_they_are_written(sites):
    plain = proposed()
    plain["privacy"]["epsilon"] = 8
    shuffled = json.dumps(dict(reversed(plain.items())), indent=2, ensure_ascii=False)
    assert read_proposal(shuffled).hash == read_proposal(GOOD).hash
    plain["run"]["num_rounds"] += 1
    assert read_proposal(json.dumps(plain)).hash != read_proposal(GOOD).hash


def test_refusals_and_hellos_are_counted_and_then_nothing_is_looked_at(sites, monkeypatch):
    sites.change("north", "policy.yaml", refusals_per_day=3, hellos_per_day=2)
    assert [ask(sites, GOOD)["state"] for _ in range(3)] == ["", "", "refused"]
    for _ in range(3):
        assert refused(ask(sites, "{"))
    written = sites.kit("north").audit.read_bytes()
    monkeypatch.setattr(handle_hello, "read_proposal", lambda text: pytest.fail("it was looked at"))
    assert refused(ask(sites, GOOD)) and refused(ask(sites, "{"))
    assert sites.kit("north").audit.read_bytes() == written  # no way to fill its disk either


# Requests ---------------------------------------------------------------------------------------------


class Tampering(SiteGrid):
    """A server that changes its orders on the way; `tamper` is given each."""

    def run_client(self, message):
        if message.metadata.message_type == MessageType.TRAIN:
            self.tamper(message)
        reply = super().run_client(message)
        self.replies = [*getattr(self, "replies", []), reply]
        return reply


def last_reason(sites: Sites, *words: str, tamper, run: str = "run") -> str:
    grid = type("Grid", (Tampering,), {"tamper": lambda self, message: tamper(message)})
    with pytest.raises((RuntimeError, UserError)):
        sites.train(*ROUND, "runtime.min_nodes=1", *words, make_grid=grid, folder=run)
    last = read_audit(sites.kit("north").audit)[-1]
    assert last["event"] == "refused"
    return last["reason"]


def ticket(**values: object):
    def tamper(message: Message) -> None:
        found = ticket_of(message) | values
        message.content["ticket"] = ConfigRecord(
            {key: value for key, value in found.items() if value is not None}
        )

    return tamper


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"proposal": "0" * 64}, "belongs to another proposal"),
        ({"proposal": None}, "names no run, or no proposal"),
        ({"proposal": ["a", "b"]}, "names no run, or no proposal"),
        ({"run": "another"}, "accepted no proposal of this run"),
        ({"run": "../state/test"}, "names no run"),
        ({"run": "TEST"}, "names no run"),
        ({"run": "test\n"}, "names no run"),
        ({"run": "tеst"}, "names no run"),
        ({"run": "/"}, "names no run"),
    ],
)
def test_an_order_without_the_accepted_proposal_is_refused(sites, values, reason):
    assert reason in last_reason(sites, tamper=ticket(**values))


def test_an_order_under_another_run_s_name_is_held_against_that_run(sites):
    """What the other run was accepted as does not cover this one's orders."""
    sites.train(*ROUND, "runtime.min_nodes=1", "run_id=other", "client.lr=0.1", folder="other")
    other = read_proposal((sites.kit("north").var / "state" / "other" / "proposal.json").read_text())
    assert "another proposal" in last_reason(sites, tamper=ticket(run="other"))
    assert "another proposal" in last_reason(sites, tamper=ticket(proposal=other.hash), run="again")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda request: request | {"code": "x"}, "other keys than a request"),
        (lambda request: request | {"trained": "abc"}, "trained is no list of names"),
        (lambda request: request | {"shared": [1]}, "shared is no list of names"),
        (lambda request: request | {"base": []}, "base does not say digests"),
        (lambda request: request | {"base": {"a": 1}}, "base does not say digests"),
        (lambda request: request | {"judge": 1}, "judge is neither"),
        (lambda request: request | {"algorithm": ["fedavg"]}, "algorithm and settings"),
        (lambda request: request | {"algorithm": "os:system"}, "the algorithm os:system"),
        (lambda request: request | {"selection": "attention"}, "selection names no rule"),
        (lambda request: request | {"phases": [[["a"], 10**9]]}, "phases are none"),
        (lambda request: request | {"phases": [1]}, "phases are none"),
        (lambda request: request | {"phases": [[request["trained"], 300]]}, "in phases that its strategy"),
        (
            lambda request: request | {"phases": [[request["trained"], None]] * 9},
            "in phases that its strategy",
        ),
        (
            lambda request: request | {"participations": {"north": 10**6}},
            "counts participations outside 1 to",
        ),
        (lambda request: request | {"participations": {"north": 0.5}}, "counts participations outside 1 to"),
        (lambda request: request | {"participations": [1]}, "participations are no numbers"),
        (lambda request: request | {"round": 2}, "round 2 of 1"),
        (lambda request: request | {"round": True}, "round True of 1"),
        (lambda request: request | {"settings": {"a": [[[[[[1]]]]]]}}, "nested too deeply"),
    ],
)
def test_an_order_that_is_none_is_refused(sites, change, reason):
    def tamper(message: Message) -> None:
        request = change(json.loads(str(message.content["order"]["json"])))
        message.content["order"] = ConfigRecord({"json": json.dumps(request)})

    assert reason in last_reason(sites, tamper=tamper)


def test_an_order_asks_only_for_the_roles_of_its_proposal(sites, monkeypatch):
    """People approved what the proposal says; the policy alone would let the rest leave too."""
    monkeypatch.setattr("fedfrozen_app.server_app.shared_roles", lambda *args: {"head"})
    assert "of which its proposal says nothing" in last_reason(sites, tamper=lambda message: None)


def changed(**values):
    """An order with other values; one that is a function is given what was there."""

    def tamper(message: Message) -> None:
        request = json.loads(str(message.content["order"]["json"]))
        for key, value in values.items():
            request[key] = value(request.get(key)) if callable(value) else value
        message.content["order"] = ConfigRecord({"json": json.dumps(request)})

    return tamper


def answers(sites: Sites, *words: str, tamper, run: str = "run") -> list[Message]:
    """What the site answers to the orders of a run, when they are changed on the way."""
    kept: list[Tampering] = []
    grid = type("Grid", (Tampering,), {"tamper": lambda self, message: tamper(message)})
    with suppress(RuntimeError, UserError):
        make = lambda *args: kept.append(grid(*args)) or kept[-1]  # noqa: E731
        sites.train("runtime.min_nodes=1", *words, make_grid=make, folder=run)
    return [r for r in kept[0].replies if r.metadata.message_type == MessageType.TRAIN]


@pytest.mark.parametrize("strategy", ["fednova", "scaffold"])
def test_no_algorithm_sends_what_the_order_does_not_share(sites, strategy):
    """Both send arrays of their own making, for whatever trains: these too are held to what may leave."""
    sites.change("north", "policy.yaml", strategies=[strategy], upload_roles=["head"])
    words = (f"strategy={strategy}", "client.optimizer=sgd", "client.weight_decay=0", "num_rounds=1")
    only_head = changed(shared=lambda names: [name for name in names if name.startswith("classifier")])
    (answer,) = answers(sites, *words, tamper=only_head)
    sent = to_tensors(answer.content["arrays"])
    assert {parameter_of(name) for name in sent} <= {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("strategy", "change", "reason"),
    [
        ("fedprox", {"settings": {"mu": 1e3}}, "other settings than the proposal"),
        ("fedavg", {"settings": {"mu": 1e3}}, "other settings than the proposal"),
        (
            "fedavg",
            {"selection": {"rule": "attention", "top_k": 1, "examples": 1, "tokens": "cls"}},
            "choose layers in another way than the proposal",
        ),
        ("fedavg", {"keep": 0.01}, "encoded in another way than the proposal"),
        (
            "fedper",
            {"base": lambda base: {**base, "classifier.weight": "0" * 64}},
            "sets classifier.weight, which the site trains itself",
        ),
    ],
)
def test_what_was_proposed_is_how_clients_train(sites, strategy, change, reason):
    """A stronger pull, a choice by a single row: nobody has judged or approved that."""
    sites.change("north", "policy.yaml", strategies=[strategy])
    answers(sites, f"strategy={strategy}", "num_rounds=1", tamper=changed(**change))
    assert reason in read_audit(sites.kit("north").audit)[-1]["reason"]


def test_a_run_has_an_end_however_often_its_rounds_are_asked_for(sites):
    """Without privacy each of them was answered for every new model, for ever, under one approval."""
    answers(sites, *ROUND, tamper=lambda message: None)
    request = {
        "run": "test",
        "proposal": read_audit(sites.kit("north").audit)[-1]["proposal"],
        "epsilon": None,
    }
    executor = sites.executors["north"]
    executor.site.audit.write("sent", **request, round=1, order="another model's", again=False)
    proposal = RunStore(sites.kit("north").var / "state" / "test", keep=1).proposal()
    policy = Policy.read(sites.kit("north").policy)
    new = TrainRequest(1, Plan.full(["a"]), {})
    found = problem_of_limits(executor.site, new, proposal, None, policy, again=False)
    assert found == "it has sent 2 updates of this run, and that is all it gives"
    assert problem_of_limits(executor.site, new, proposal, None, policy, again=True) is None
    sites.restart()  # and the disk remembers
    assert problem_of_limits(sites.executors["north"].site, new, proposal, None, policy, again=False) == found


def test_no_line_of_the_log_is_written_for_nothing_for_ever(sites):
    """Asked for what was sent, or told of arrays that are not there: each is a line on the site's disk."""
    sites.change("north", "policy.yaml", rounds_per_day=1)
    sites.train(*ROUND, "runtime.min_nodes=1")
    audit = sites.kit("north").audit

    def asked(*tampers) -> list[str]:
        """The same run from its beginning, as often as there are words for how its orders are changed."""
        for tamper in tampers:
            answers(sites, *ROUND, tamper=tamper, run=f"run{len(list(sites.folder.iterdir()))}")
        return [entry["event"] for entry in read_audit(audit) if entry["event"] in ("sent", "lacks")]

    assert asked(*[lambda message: None] * 2) == [
        "sent",
        "sent",
    ]  # the second is the same, and there is no third
    absent = changed(base=lambda base: base | {"vit.embeddings.cls_token": "0" * 64})
    sites.change("north", "policy.yaml", rounds_per_day=2)
    assert asked(*[absent] * 3) == ["sent", "sent", "lacks", "lacks"]


def test_the_head_of_the_log_does_not_tell_what_was_written(sites):
    """Its time is known to a moment and the reasons are public: without a salt all could be tried."""
    began = datetime.datetime.now(datetime.UTC)
    told = ask(sites, "{")["anchor"]
    last = read_audit(sites.kit("north").audit)[-1]
    guess = {key: last[key] for key in ("event", "message", "flower_run", "bundle", "reason", "previous")}
    microsecond = datetime.timedelta(microseconds=1)
    at = datetime.datetime.fromisoformat(last["time"]) - 500 * microsecond
    assert at > began - datetime.timedelta(seconds=1)
    tried = {_digest({"time": (at + n * microsecond).isoformat(), **guess}) for n in range(1000)}
    assert told == last["digest"] and told not in tried
    assert len(bytes.fromhex(last["salt"])) == 16
    ask(sites, "{")
    assert read_audit(sites.kit("north").audit)[-1]["salt"] != last["salt"]


def test_true_numbers_of_rows_are_no_figures(sites):
    sites.change("north", "policy.yaml", strategies=["local"])
    for examples, train_rows in ((None, lambda rows: rows % 10 == 0), (500, lambda rows: rows == 500)):
        views = {"main": VIEWS["main"] | ({"examples": examples} if examples else {"limit": 197})}
        sites.change("north", "site.yaml", views=views)
        sites.train("strategy=local", "num_rounds=1", "runtime.min_nodes=1", f"run_id=of-{examples or 0}")
        judged = read_audit(sites.kit("north").audit)[-1]
        assert judged["event"] == "judged" and "personal" in judged["metrics"]
        assert train_rows(judged["metrics"]["train_rows"]) and judged["metrics"]["test_rows"] % 10 == 0


def test_people_are_counted_among_the_rows_that_train(sites):
    """Some steps see some rows: that these are of few people is not hidden by those that they leave out."""
    sites.restart()
    executor = sites.executors["north"]
    rows = torch.arange(100)
    who = np.array([*["one"] * 80, *(f"other {n}" for n in range(20))], dtype=object)
    worker = SimpleNamespace(
        rows=lambda name: SimpleNamespace(train=rows),
        corpus=SimpleNamespace(columns={"patient": who}),
        config=Config(client=ClientConfig(local_steps=1, batch_size=20), seed=3),
    )
    view = replace(executor.kit.view(None), unit="patient", unit_column=None)
    request = TrainRequest(1, Plan(("a", "b"), ("a",), ("b",), (Phase(("b",), 5), Phase(("a",)))), {})
    drawn = rows_by_phase(worker, "north", request)
    trained = [
        batches(rows, worker.config.client, 3, "north", 1)[0],
        drawn_rows(rows, worker.config.client, 3, "north", 1, 1)[0],
    ]
    assert all((one == other).all() for one, other in zip(drawn, trained, strict=True))
    counts = [count_rows(worker, view, found) for found in drawn]
    people = [len({who[row] for row in found.tolist()}) for found in drawn]
    assert [count for count, _ in counts] == [20, 20] and [found for _, found in counts] == people
    assert fewest(counts) == (20, min(people)) and min(people) < 20
    worker.config.client.local_steps = None
    assert fewest([count_rows(worker, view, found) for found in rows_by_phase(worker, "north", request)]) == (
        100,
        21,
    )


def test_no_answer_to_an_order_tells_more_than_another(sites):
    """Refused for its ticket, its text, its round, or failed on the way: the same but for the log's head."""
    told = set()
    for number, tamper in enumerate(
        (ticket(run="x"), broken_text, lambda m: m.content.pop("order"), lambda m: m.content.pop("arrays"))
    ):
        grid = type("Grid", (Tampering,), {"tamper": lambda self, message, tamper=tamper: tamper(message)})
        kept: list[Tampering] = []
        make = lambda *args, grid=grid, kept=kept: kept.append(grid(*args)) or kept[-1]  # noqa: E731
        with pytest.raises((RuntimeError, UserError)):
            sites.train(*ROUND, "runtime.min_nodes=1", make_grid=make, folder=f"run{number}")
        record = json.loads(str(kept[0].replies[-1].content["reply"]["json"]))
        assert re.fullmatch("[0-9a-f]{64}", record.pop("anchor"))
        assert not dict(kept[0].replies[-1].content["arrays"])
        told.add((json.dumps(record), str(dict(kept[0].replies[-1].content["metrics"]))))
    assert len(told) == 1 and client_app.FAILED in str(told)


def broken_text(message: Message) -> None:
    message.content["order"] = ConfigRecord({"json": "[" * 10_000})


def test_a_site_composes_nothing_and_forgets_nothing(sites, monkeypatch):
    """With every cache emptied before every message, and composing forbidden, each run is the same."""

    class Forgetful(SiteGrid):
        def run_client(self, message):
            accepted.run_of_text.cache_clear()
            workers._accepted.clear()
            self._loaded.clear()
            with monkeypatch.context() as patch:
                patch.setattr(workers, "compose_config", lambda words: pytest.fail("it composes"))
                patch.setattr("hydra.compose", lambda *args, **kwargs: pytest.fail("it composes"))
                return super().run_client(message)

    words = ("num_rounds=2", "strategy.warmup_rounds=1", "runtime.min_nodes=1")
    one = sites.train(*words, "run_id=one", folder="one")
    two = sites.train(*words, "run_id=two", folder="two", make_grid=Forgetful)
    assert all((one.model[name] == value).all() for name, value in two.model.items())
    assert one.rows[1]["clients_failed"] == two.rows[1]["clients_failed"] == 0


def test_a_train_request_is_parsed_once_and_what_was_checked_is_what_trains(sites, monkeypatch):
    parsed, checked, trained = [], [], []
    loads, read_request, train_client = (
        json.loads,
        check_train.read_strict_train_request,
        train_handler.train_client,
    )

    class Counting(SiteGrid):
        def run_client(self, message):
            self.order = str(message.content["order"]["json"]) if "order" in message.content else None
            return super().run_client(message)

    def count(text, **more):
        if grids and text == getattr(grids[-1], "order", None):
            parsed.append(text)
        return loads(text, **more)

    grids = []
    monkeypatch.setattr(json, "loads", count)
    monkeypatch.setattr(
        check_train,
        "read_strict_train_request",
        lambda text: checked.append(read_request(text)) or checked[-1],
    )
    monkeypatch.setattr(
        train_handler, "train_client", lambda *given: trained.append(given[2]) or train_client(*given)
    )
    sites.train(
        *ROUND, "runtime.min_nodes=1", make_grid=lambda *given: grids.append(Counting(*given)) or grids[-1]
    )
    assert len(parsed) == len(checked) == len(trained) == 1
    assert checked[0] is trained[0]


def test_a_clock_changes_nothing(sites, monkeypatch):
    """Policy and training see one object: whatever the time, what was judged is what runs."""
    sites.train("num_rounds=1", "strategy.warmup_rounds=1", "runtime.min_nodes=1")
    kept = sites.kit("north").var / "state" / "test" / "proposal.json"
    run = accepted.run_of_text(
        read_proposal(kept.read_text()).text, sites.kit("north").view(None), None, "cpu"
    )

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(days=400)

    monkeypatch.setattr(datetime, "datetime", Later)
    accepted.run_of_text.cache_clear()
    again = accepted.run_of_text(
        read_proposal(kept.read_text()).text, sites.kit("north").view(None), None, "cpu"
    )
    assert run == again


# Many proposals ---------------------------------------------------------------------------------------------

WATCH: dict[str, list | None] = {"seen": None}
TOUCHES = (
    "open",
    "os.listdir",
    "os.scandir",
    "glob.glob",
    "socket.connect",
    "subprocess.Popen",
    "os.system",
    "import",
)


def _hook(event: str, args: tuple) -> None:
    if WATCH["seen"] is not None and event in TOUCHES:
        WATCH["seen"].append((event, args[0]))


@cache
def _listen() -> None:
    """It cannot be taken away again: `WATCH` says when it looks. Set late, for it slows all."""
    sys.addaudithook(_hook)


@contextmanager
def watched(sites: Sites):
    """What is opened, listed, imported or connected outside the site's kit, and variables that are read."""
    kit, seen, found = sites.kit("north").folder, [], []
    real = os._Environ.__getitem__

    def environment(self, key):
        seen.append(("environment", key))
        return real(self, key)

    _listen()
    os._Environ.__getitem__ = environment
    WATCH["seen"] = seen
    try:
        yield found
    finally:
        WATCH["seen"] = None
        os._Environ.__getitem__ = real
        found += [(event, what) for event, what in seen if not str(what).startswith(str(kit))]


odd = st.sampled_from(
    [
        *(
            "${oc.env:SECRET}",
            "'$'{oc.env:SECRET}",
            "../../etc/passwd",
            "/etc/passwd",
            "file:///etc",
            "~",
            "$HOME",
        ),
        *(
            "＄{oc.env:HOME}",
            "\u202e/cte/",
            "a\x00b",
            "%s%n",
            "{0.__class__}",
            "os:system",
            "hub",
            "fedfrozen",
        ),
        *(
            "main",
            "../main",
            "dp_sgd",
            "none",
            "auto",
            "patient",
            "example",
            "__class__",
            "_target_",
            "hydra",
        ),
        *(
            "kernels-community/flash-attn",
            "checkpoint",
            "config",
            "linear",
            "cnn",
            "vit",
            "bert",
            "0",
            "1e400",
        ),
    ]
)
numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, 2, 2**31, 2**53, 1e-300]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, odd, st.text(max_size=40))
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(odd | st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def proposals(draw):
    """An honest one with some of its values or keys changed; or any JSON; or a text that is spoilt."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return json.dumps(draw(values))
    plain = copy.deepcopy(HONEST[draw(st.integers(0, len(HONEST) - 1))])
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from(sorted(plain)))
        inside = plain[section]
        if not isinstance(inside, dict) or draw(st.integers(0, 9)) == 0:
            plain[section] = draw(values)
            continue
        if not inside:
            continue
        key = draw(st.sampled_from(sorted(inside, key=str)))
        change = draw(st.integers(0, 5))
        if change == 0:
            del inside[key]
        elif change == 1:
            inside[draw(odd | st.text(max_size=12))] = draw(values)
        elif change == 2 and isinstance(inside[key], dict):
            inside[key][draw(odd | st.text(max_size=12))] = draw(values)
        else:
            inside[key] = draw(values)
    text = json.dumps(plain, ensure_ascii=draw(st.booleans()))
    if kind == 1:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=5)) + text[at + draw(st.integers(0, 5)) :]
    return text


HONEST = [
    proposed(),
    proposed("privacy=dp_sgd", "privacy.epsilon=1"),
    proposed("strategy=local", "runtime.view=main"),
    proposed("seed=3"),
]


def try_proposals(sites: Sites, examples: int) -> dict[str, int]:
    """How many were taken and refused."""
    sites.change("north", "policy.yaml", refusals_per_day=10**9, hellos_per_day=10**9)
    for plain in HONEST:
        assert ask(sites, canonical(plain))["state"] == ""  # what is imported once is imported now
    count = {"": 0, "refused": 0}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(proposals())
    def attempt(text: str) -> None:
        with watched(sites) as seen:
            answer = ask(sites, text)
        assert not seen, text
        assert SECRET not in json.dumps(answer)
        count[answer["state"]] += 1
        assert answer["state"] != "refused" or refused(answer)

    attempt()
    events = [entry["event"] for entry in read_audit(sites.kit("north").audit)]
    assert set(events) <= {
        "hello",
        "refused",
    }  # and never "failed": no exception came as far as the request handler
    return count


def test_a_hundred_proposals(sites):
    count = try_proposals(sites, 100)
    assert count["refused"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_proposals(sites):
    count = try_proposals(sites, 20_000)
    assert count["refused"] > 10_000 and count[""] > 10
