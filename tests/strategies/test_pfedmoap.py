"""pFedMoAP with a tiny random CLIP in float64: rounds of three clients by hand, who is given whose context
and at what cost, both runners, resuming, over the wire, and what no order may set."""

import json
import shutil

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from safetensors.torch import load_file
from torch.nn import functional

from clients.pfedmoap import Gate
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files import checkpoint
from fedfrozen_app.handlers.request_check import incomplete
from fedfrozen_app.sites.audit_log import read_audit
from tests.conftest import same_bits, worker_of
from tests.server.wire import run_wired
from tests.sites.inprocess import SiteGrid, with_prompts
from tests.strategies.dual import TEXT_TOKENS, TEXT_WIDTH
from tests.strategies.prompts_by_hand import BY_HAND, COMMON, LR, ByHand

CONTEXT = "prompts.text.global"
GATE = [f"fusion.text.{part}.weight" for part in ("query", "key", "value", "output")]
SHARE, HEADS, EVERY = 0.3, 2, 3  # the CLIP's features have 12 numbers; the gate looks at 4 of them
MOAP = ["strategy=pfedmoap", *COMMON, f"strategy.gate_heads={HEADS}", "strategy.gate_width=4"]
MOAP += [f"strategy.share={SHARE}"]
SIZE = TEXT_TOKENS * TEXT_WIDTH  # numbers in a context


def gated_scores(images, texts, gate):
    """exp(s) is not in it. Number by number: images (batch, 12), texts a (classes, 12) for each context."""
    width = images[:, ::EVERY].shape[1]
    query, key, value, output = gate
    alone = images @ texts[0].T
    if len(texts) == 1:
        return alone
    rows = []
    for picture in images:
        small, row = picture[::EVERY], []
        for number in range(len(texts[0])):
            own = torch.stack([text[number, ::EVERY] for text in texts])  # (contexts, 4)
            heads = []
            for head in np.split(np.arange(width), HEADS):
                asked = (own @ key.T)[:, head] @ (query @ small)[head] / len(head) ** 0.5
                heads.append(asked.softmax(dim=0) @ (own @ value.T)[:, head])
            row.append(small @ (output @ torch.cat(heads)))
        rows.append(torch.stack(row))
    return SHARE * alone + torch.stack(rows)


class Federation:
    """The whole method on paper: pool, neighbours, gates, and what each client holds already."""

    def __init__(self, worker, experts):
        self.hand, self.experts, self.worker = ByHand(worker), experts, worker
        start = worker.initial()
        self.context = start[CONTEXT]
        self.first_gate = [start[name] for name in GATE]
        self.pool, self.gates, self.given, self.holds = {}, {}, {}, {}
        self.version = {}  # client: the round in which it sent what the pool has of it

    def neighbours(self, client):
        if client not in self.pool:
            return []
        own = self.pool[client]
        far = {c: float((p - own).square().sum().sqrt()) for c, p in self.pool.items() if c != client}
        return sorted(far, key=far.get)[: self.experts]

    def round(self, number, cohort):
        """The bytes that go down, in arrays."""
        chosen = {client: self.neighbours(client) for client in cohort}
        sent, trained, down = {}, {}, 0
        for client in cohort:
            base = {("mean", number), *((other, self.version[other]) for other in chosen[client])}
            down += len(base - self.holds.get(client, set()))
            self.holds[client] = base
            self.given[client] = [self.pool[other] for other in chosen[client]]
            context = self.context.clone().requires_grad_(True)
            gate = [part.clone().requires_grad_(True) for part in self.gates.get(client, self.first_gate)]
            pixels, labels = self.hand.batch(client)
            images = self.hand.hidden(pixels)[:, 0]
            texts = [self.hand.texts(context[0])]
            with torch.no_grad():
                texts += [self.hand.texts(expert[0]) for expert in self.given[client]]
            scores = self.hand.scale * gated_scores(images, texts, gate)
            functional.cross_entropy(scores, labels).backward()
            sent[client] = context.detach() - LR * context.grad
            moved = [part.detach() - LR * part.grad if len(texts) > 1 else part.detach() for part in gate]
            trained[client] = (len(labels), moved)
        total = sum(rows for rows, _ in trained.values())
        self.context = sum(rows / total * sent[client] for client, (rows, _) in trained.items())
        self.gates |= {client: gate for client, (_, gate) in trained.items()}
        self.pool |= sent
        self.version |= dict.fromkeys(cohort, number)
        return down


@pytest.mark.parametrize(
    ("experts", "runner"),
    [
        (1, "sequential"),
        pytest.param(1, "cohort", marks=pytest.mark.slow),
        pytest.param(2, "sequential", marks=pytest.mark.slow),
        pytest.param(2, "cohort", marks=pytest.mark.slow),
    ],
)
def test_rounds_by_hand(train, experts, runner):
    """Two of three clients a round, so that some are there for the first time while others have experts."""
    words = [*MOAP, *BY_HAND, "num_rounds=4", f"strategy.experts={experts}"]
    run = train(*words, f"runtime.runner={runner}", small=False)
    paper = Federation(worker_of(*words), experts)
    for row in run.rows[1:]:
        assert len(row["clients"]) == 2 and row["clients_failed"] == 0
        arrays = paper.round(row["round"], row["clients"])
        assert row["bytes_down_by_role"] == {"prompt": 8 * SIZE * arrays}
        assert row["bytes_up_by_role"] == {"prompt": 8 * SIZE * 2}
    end = checkpoint.newest(run.folder)
    torch.testing.assert_close(run.model[CONTEXT], paper.context, rtol=0, atol=1e-9)
    assert end.strategy.keys() == {f"strategy/{client}" for client in paper.pool}
    for client, context in paper.pool.items():
        torch.testing.assert_close(end.strategy[f"strategy/{client}"], context, rtol=0, atol=1e-9)
    assert any(len(given) == experts for given in paper.given.values())
    for client, gate in paper.gates.items():
        kept = end.clients[client]
        for name, part in zip(GATE, gate, strict=True):
            torch.testing.assert_close(kept[name], part, rtol=0, atol=1e-9)
        for number in range(experts):
            given = paper.given[client]
            expected = given[number] if number < len(given) else torch.zeros_like(paper.context)
            torch.testing.assert_close(kept[f"prompts.text.expert{number + 1}"], expected, rtol=0, atol=1e-9)


def test_the_first_round_is_promptfl_s_to_the_bit(train):
    """Nobody has experts yet; the gates have no gradient, and without decay do not move."""
    promptfl = ["strategy=pfeddc", "strategy.prompts=global", "strategy.modalities=text"]
    plain = train(*promptfl, *COMMON, *BY_HAND, folder="plain", small=False)
    moap = train(*MOAP, *BY_HAND, folder="moap", small=False)
    assert torch.equal(moap.model[CONTEXT], plain.model[CONTEXT])
    start = worker_of(*MOAP).initial()
    for kept in checkpoint.newest(moap.folder).clients.values():
        assert all(torch.equal(kept[name], start[name]) for name in GATE)


def test_an_expert_that_is_not_there_has_no_part():
    torch.manual_seed(0)
    gate = Gate(6, 2).double()
    pictures, texts = torch.randn(4, 6).double(), torch.randn(3, 5, 6).double()
    found = gate(pictures, texts, torch.tensor([True, False, True]))
    torch.testing.assert_close(found, gate(pictures, texts[[0, 2]], torch.tensor([True, True])))


@pytest.mark.slow
def test_cohort_equals_sequential_also_for_personal_models(train):
    words = [*MOAP, "num_rounds=3", "participation=0.67", "personal=true", "strategy.experts=2"]
    one = train(*words, folder="one", small=False)
    other = train(*words, "runtime.runner=cohort", folder="other", small=False)
    torch.testing.assert_close(other.model, one.model, rtol=0, atol=1e-9)
    states = [checkpoint.newest(run.folder).clients for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for client, arrays in states[0].items():
        torch.testing.assert_close(states[1][client], arrays, rtol=0, atol=1e-9)
    for figure in ("bytes_down", "bytes_up", "personal_accuracy", "client_val_before", "client_val_after"):
        assert [row.get(figure) for row in one.rows] == pytest.approx([row.get(figure) for row in other.rows])
    assert one.summary["personal"]["personal"] == pytest.approx(other.summary["personal"]["personal"])


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(train, runner):
    words = [*MOAP, "participation=0.67", f"runtime.runner={runner}"]
    whole = train(*words, "num_rounds=4", folder="whole", small=False)
    train(*words, "num_rounds=2", folder="part", small=False)
    part = train(*words, "num_rounds=4", folder="part", resume=True, small=False)
    assert same_bits(whole.model, part.model)
    ends = [checkpoint.newest(run.folder) for run in (whole, part)]
    assert same_bits(ends[0].strategy, ends[1].strategy)
    assert all(same_bits(ends[0].clients[client], ends[1].clients[client]) for client in ends[0].clients)
    assert [row["bytes_down"] for row in whole.rows[1:]] == [row["bytes_down"] for row in part.rows[1:]]


def test_a_judgement_sends_no_expert_again(train):
    run = train(*MOAP, "personal=true", "strategy.experts=2", small=False)
    shared_alone = 3 * 8 * SIZE
    assert shared_alone < run.summary["personal"]["bytes_down"] < 2 * shared_alone + 8000  # and three orders


@pytest.mark.slow
def test_as_bytes_and_from_disk_the_same_bits(train, tmp_path):
    words = [*MOAP, "num_rounds=4", "participation=0.67"]
    plain = train(*words, small=False)
    wired = run_wired(tmp_path, extra=words, small=False)
    assert same_bits(plain.model, wired.model)
    told = [
        [row[f"bytes_{way}_by_role"] for row in run.rows[1:]]
        for run in (plain, wired)
        for way in ("up", "down")
    ]
    assert told[:2] == told[2:]


def test_the_forecast_is_what_everybody_s_rounds_send(train):
    words = [*MOAP, "num_rounds=3", "strategy.experts=1"]
    run = train(*words, small=False)
    found = forecast(read(resolved(compose_config(words))))
    assert [dict(counts) for counts in found.down_by_round] == [
        row["bytes_down_by_role"] for row in run.rows[1:]
    ]


def test_what_a_client_trains_for_itself_no_order_may_set():
    worker = worker_of(*MOAP)
    trained = (CONTEXT, *GATE)
    private = tuple(name for name in worker.exchanged if name != CONTEXT)
    plan = Plan(trained, (CONTEXT,), private)
    allowed = TrainRequest(2, plan, {CONTEXT: "", "prompts.text.expert1": ""})
    assert incomplete(worker, allowed) == ""
    taken = TrainRequest(2, plan, {CONTEXT: "", GATE[0]: ""})
    assert incomplete(worker, taken).endswith(f"the request sets {GATE[0]}, which the client trains itself")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("strategy.experts=0", "strategy.experts"),
        ("strategy.gate_heads=5", "strategy.gate_heads=5 does not divide the 4 numbers"),
        ("privacy=dp_sgd", "keeps parts of the model on the client"),
    ],
)
def test_a_bad_setting_is_one_sentence(word, said, capsys, tmp_path):
    assert command([*MOAP, word, f"hydra.run.dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err


# At sites ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    return with_prompts(tmp_path / "sites", "pfedmoap", MOAP)


def kept_at(sites, name, number):
    (path,) = (sites.kit(name).var / "state" / "test").glob(f"*/{number}/private.safetensors")
    return load_file(path)


def test_sites_keep_their_gates_and_are_given_each_other_s_contexts(sites):
    """One of them loses what it kept before the last round: it begins anew, and is given experts again."""

    class Loses(SiteGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "3":
                for path in (sites.kit("north").var / "state" / "test").glob("[0-9]*"):
                    shutil.rmtree(path)
                self.contexts[1].state.clear()
            return super().push_messages(messages)

    words = ["num_rounds=3", "strategy.experts=2", "personal=false", "client.local_steps=1"]
    words += ["client.weight_decay=0", "client.momentum=0"]
    run = sites.train(*words, make_grid=Loses)
    assert [row["clients_failed"] for row in run.rows[1:]] == [0, 0, 0]
    assert [row["bytes_up_by_role"].keys() for row in run.rows[1:]] == [{"prompt"}] * 3
    pool = checkpoint.read(run.folder / "checkpoints" / "2").strategy
    others = {name: [pool[f"strategy/{o}"] for o in sites.names if o != name] for name in sites.names}
    for name in sites.names:
        kept = kept_at(sites, name, 3)
        assert set(kept) == {*GATE, "prompts.text.expert1", "prompts.text.expert2"}
        given = [kept[f"prompts.text.expert{number}"] for number in (1, 2)]
        assert any(torch.equal(given[0], other) for other in others[name])
        assert any(torch.equal(given[1], other) for other in others[name])
        assert not torch.equal(*given)


def test_a_site_refuses_an_order_that_sets_its_gate(sites):
    class Sets(SiteGrid):
        def run_client(self, message):
            if message.metadata.message_type == "train":
                request = json.loads(str(message.content["order"]["json"]))
                request["base"][GATE[0]] = "0" * 64
                message.content["order"] = ConfigRecord({"json": json.dumps(request)})
            return super().run_client(message)

    with pytest.raises(RunFailed):
        sites.train("num_rounds=1", "personal=false", make_grid=Sets)
    said = read_audit(sites.kit("north").audit)[-1]["reason"]
    assert said.endswith(f"sets {GATE[0]}, which the site trains itself")
