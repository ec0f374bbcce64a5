"""What a client's algorithm may say, in both runners: any parameters' loss, arrays of its own, phases."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from clients.fedprox import FedProx
from fedfrozen_app import registry
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.plan import Phase
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Algorithm, Finished, squared_distance
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.models.task import Batch
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import SMALL, same_bits
from tests.flower.test_runtimes import is_key_bias

WORDS = ["strategy=fedavg", "model.dtype=float64", "client=sgd", "client.momentum=0", "client.lr=0.05"]
WORDS += ["num_rounds=3", "participation=0.7", "checkpoint.keep=9", "model.config.num_hidden_layers=1"]


@pytest.fixture
def both(train, monkeypatch):
    """The same run with this algorithm under either runner; `plan` changes the strategy's."""

    def both(algorithm, *words, plan=None, folder="run"):
        name = f"own {algorithm.__name__}"  # its own: orders that were read are remembered by their text

        class Own(PlannedFedAvg):
            algorithm = name

            def plan(self, server_round):
                given = super().plan(server_round)
                return plan(given, self.federation.roles) if plan else given

        monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), Own)
        monkeypatch.setitem(registry.REGISTERED, ("algorithms", name), algorithm)
        runners = ("sequential", "cohort")
        return [train(*WORDS, *words, f"runtime.runner={r}", folder=f"{folder}-{r}") for r in runners]

    return both


def assert_alike(one, other):
    """Models, what clients keep, and figures of two runs, within 1e-9 of their size."""
    states = [{"": run.model} | checkpoint.newest(run.folder).clients for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for client, arrays in states[0].items():
        assert arrays.keys() == states[1][client].keys()
        for name, value in arrays.items():
            if not is_key_bias(name):
                apart = float((states[1][client][name] - value).norm())
                assert apart <= 1e-9 * max(1.0, float(value.norm())), (client, name)
    for row, twin in zip(one.rows[1:], other.rows[1:], strict=True):
        assert row["train_loss"] == pytest.approx(twin["train_loss"], rel=1e-9)
        assert row["bytes_up"] == twin["bytes_up"] and row["bytes_down"] == twin["bytes_down"]
    return states[0]


class LooksBack(Algorithm):
    """f(w) + f(w_t): the second term moves nothing, and must be the anchor's loss, not the model's."""

    def loss(self, parameters, batch, task, start):
        return task.loss(parameters, batch) + task.loss(start.anchor, batch)


@pytest.mark.slow
def test_the_loss_of_an_anchor_is_the_anchor_s_in_both_runners(both, train, monkeypatch):
    one, other = both(LooksBack)
    assert_alike(one, other)
    monkeypatch.undo()
    plain = train(*WORDS, folder="plain")
    assert same_bits(one.model, plain.model)
    assert one.rows[1]["train_loss"] > 1.5 * plain.rows[1]["train_loss"]


@dataclass(frozen=True)
class OwnModel(Algorithm):
    """Ditto, Li et al. 2021: FedAvg for w, and beside it v with f(v) + (λ/2)‖v − w_t‖²."""

    stays, trains = ("v",), ("v",)

    def start(self, model, own):
        return {"v": {name: own.get("v", {}).get(name, value) for name, value in model.items()}}

    def loss(self, parameters, batch, task, start):
        v = start.own["v"]
        near = squared_distance(v, start.anchor)
        return task.loss(parameters, batch) + task.loss(v, batch) + 0.5 * near


@pytest.mark.slow
def test_arrays_that_train_beside_the_parameters(both, train, monkeypatch):
    one, other = both(OwnModel)
    states = assert_alike(one, other)
    monkeypatch.undo()
    plain = train(*WORDS, folder="plain")
    for name, value in plain.model.items():  # what is shared is FedAvg's, whatever trains beside it
        torch.testing.assert_close(states[""][name], value, rtol=1e-9, atol=1e-10)
    owners = states.keys() - {""}
    assert owners and all(set(states[who]) == {f"v/{name}" for name in plain.model} for who in owners)
    assert one.rows[-1]["bytes_up_by_role"] == plain.rows[-1]["bytes_up_by_role"]  # nothing of v travels
    moved = [
        not torch.equal(states[who][f"v/{name}"], plain.model[name]) for who in owners for name in plain.model
    ]
    assert any(moved)


@dataclass(frozen=True)
class Contrast(Algorithm):
    """MOON, Li et al. 2021: a row's representation near the global model's, far from its own one before."""

    stays = ("previous",)

    def start(self, model, own):
        return own if own else {"previous": dict(model)}  # then both terms are equal, and nothing is pulled

    def loss(self, parameters, batch, task, start):
        logits, here = task.features(parameters, batch)
        near, far = (task.features(other, batch)[1] for other in (start.anchor, start.own["previous"]))
        pairs = torch.stack([functional.cosine_similarity(here, other) for other in (near, far)], dim=1)
        apart = functional.cross_entropy(pairs, torch.zeros_like(batch.labels), reduction="none")
        weight = torch.ones_like(apart) if batch.mask is None else batch.mask
        return task.loss_of(logits, batch) + (apart * weight).sum() / weight.sum().clamp(min=1e-9)

    def finish(self, start, trained, steps, rate):
        return Finished(own={"previous": dict(trained)})


def test_representations_of_the_global_and_the_previous_model(both):
    states = assert_alike(*both(Contrast))
    assert all(name.startswith("previous/") for who in states if who for name in states[who])


class Normalised(Algorithm):
    """FedNova, Wang et al. 2020: what is sent is w_t + Δᵢ/K, and K beside it."""

    def finish(self, start, trained, steps, rate):
        sent = {
            name: start.model[name] + (value - start.model[name]) / steps for name, value in trained.items()
        }
        return Finished(model=sent, figures={"steps": steps})


def test_what_is_sent_may_differ_from_what_was_trained(both):
    one, other = both(Normalised, "num_rounds=1", "partition.alpha=0.1")
    assert_alike(one, other)
    assert one.rows[1]["steps"] == pytest.approx(other.rows[1]["steps"]) and one.rows[1]["steps"] > 1


def private_head(plan, roles):
    return plan.keep_private(name for name in plan.trained if roles[name].kind == "head")


def test_a_pull_towards_one_s_own_private_part(both):
    class Own(FedProx):
        def __init__(self):
            super().__init__(mu=0.5)

    assert_alike(*both(Own, plan=private_head))


def head_first(plan, roles):
    head = tuple(name for name in plan.trained if roles[name].kind == "head")
    body = tuple(name for name in plan.trained if name not in head)
    return private_head(plan, roles).in_phases(Phase(head, epochs=2), Phase(body))


@pytest.mark.parametrize("client", ["client.weight_decay=0.1", "client.clip=0.1", "client.head_lr=0.01"])
@pytest.mark.slow
def test_phases_train_their_names_one_after_another(both, client):
    """With clients of unequal size, so that slots are in different phases at the same time."""
    one, other = both(Algorithm, client, plan=head_first, folder=client)
    assert_alike(one, other)


def test_a_phase_moves_only_its_own_names(train, monkeypatch):
    """Two phases are two rounds of the same client: first the head alone, then the body alone."""
    words = [
        "num_clients=1",
        "partition=iid",
        "num_rounds=1",
        "dataset.client_validation=0",
        "participation=1",
    ]

    class Phased(PlannedFedAvg):
        def plan(self, server_round):
            head = tuple(n for n in self.model if self.federation.roles[n].kind == "head")
            body = tuple(n for n in self.model if n not in head)
            return super().plan(server_round).in_phases(Phase(head), Phase(body))

    class HeadAlone(PlannedFedAvg):
        def plan(self, server_round):
            roles = self.federation.roles
            return super().plan(server_round).freeze(n for n in roles if roles[n].kind != "head")

    runs = {}
    for cls in (Phased, HeadAlone):
        monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), cls)
        runs[cls] = train(*WORDS, *words, folder=cls.__name__).model
    heads = [name for name in runs[Phased] if name.startswith("classifier")]
    # The second phase leaves the head where the first, whose batches are a round's own, put it.
    assert heads and all(torch.equal(runs[Phased][name], runs[HeadAlone][name]) for name in heads)
    body = [name for name in runs[Phased] if name not in heads and not is_key_bias(name)]
    assert all(not torch.equal(runs[Phased][name], runs[HeadAlone][name]) for name in body)


@pytest.mark.parametrize("words", [["model=vit_tiny"], ["model=bert_tiny", "dataset=synthetic_clinical"]])
def test_the_head_turns_a_representation_into_logits(words):
    small = [word for word in SMALL if "model.config" not in word and "limit" not in word]
    config = read(resolved(compose_config([*small, "dataset.limit=40", "strategy=fedavg", *words])))
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, 1))
    batch = Batch(*resident.take(torch.arange(5)))
    resident.model.eval()
    logits, read_by_head = resident.task.features(resident.parameters, batch)
    assert torch.equal(logits, resident.task.logits(resident.parameters, batch))
    assert read_by_head.shape[0] == 5 and read_by_head.ndim == 2
    weight, bias = (resident.parameters[f"classifier.{part}"] for part in ("weight", "bias"))
    torch.testing.assert_close(functional.linear(read_by_head, weight, bias), logits)
