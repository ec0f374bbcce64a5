"""What a client's algorithm may say, in both runners: any parameters' loss, arrays of its own, phases."""

import pytest
import torch
from torch.nn import functional

from clients.fedprox import FedProx
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.plan import Phase
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from fedfrozen_app.server.base import PlannedFedAvg
from tests.comparing import assert_alike, is_key_bias
from tests.conftest import SMALL, same_bits
from tests.local.algorithms import Contrast, Normalised, OwnModel, head_first, private_head

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


@pytest.mark.slow
def test_arrays_that_train_besides_the_parameters(both, train, monkeypatch):
    one, other = both(OwnModel)
    states = assert_alike(one, other)
    monkeypatch.undo()
    plain = train(*WORDS, folder="plain")
    for name, value in plain.model.items():  # what is shared is FedAvg's, whatever trains besides it
        torch.testing.assert_close(states[""][name], value, rtol=1e-9, atol=1e-10)
    owners = states.keys() - {""}
    assert owners and all(set(states[who]) == {f"v/{name}" for name in plain.model} for who in owners)
    assert one.rows[-1]["bytes_up_by_role"] == plain.rows[-1]["bytes_up_by_role"]  # nothing of v travels
    moved = [
        not torch.equal(states[who][f"v/{name}"], plain.model[name]) for who in owners for name in plain.model
    ]
    assert any(moved)


def test_representations_of_the_global_and_the_previous_model(both):
    states = assert_alike(*both(Contrast))
    assert all(name.startswith("previous/") for who in states if who for name in states[who])


def test_what_is_sent_may_differ_from_what_was_trained(both):
    one, other = both(Normalised, "num_rounds=1", "partition.alpha=0.1")
    assert_alike(one, other)
    assert one.rows[1]["steps"] == pytest.approx(other.rows[1]["steps"]) and one.rows[1]["steps"] > 1


def test_a_pull_towards_one_s_own_private_part(both):
    class Own(FedProx):
        def __init__(self):
            super().__init__(mu=0.5)

    assert_alike(*both(Own, plan=private_head))


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
    worker = Worker(config, corpus, shares=share_out(corpus, config, 1))
    batch = Batch(*worker.take(torch.arange(5)))
    worker.model.eval()
    logits, read_by_head = worker.task.features(worker.parameters, batch)
    assert torch.equal(logits, worker.task.logits(worker.parameters, batch))
    assert read_by_head.shape[0] == 5 and read_by_head.ndim == 2
    weight, bias = (worker.parameters[f"classifier.{part}"] for part in ("weight", "bias"))
    torch.testing.assert_close(functional.linear(read_by_head, weight, bias), logits)
