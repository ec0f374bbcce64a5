"""SCAFFOLD, FedDyn, FedNova and MOON: rounds by hand, the references' formulas, and what each equals.

By hand (see quadratics.py): client 0 has 1 example, f = ½(w − 1)² and 2 steps; client 1 has 3 examples,
f = (w + 1)² and 1 step; the rate is 0.1 and w begins at 0. In round 2 client 0 is alone.
"""

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from clients.fednova import accumulated
from clients.moon import Moon
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.fedfrozen import FedFrozen
from strategies.fednova import FedNova
from strategies.scaffold import Scaffold
from tests.comparing import assert_alike
from tests.conftest import SMALL, same_bits, slowly
from tests.resuming import killed_before_checkpoint
from tests.strategies.quadratics import TWO, Quadratic, run, value

THEN_ONE_ALONE = [["0", "1"], ["0"]]
NEAR = {"abs": 1e-12}


# Two rounds by hand ---------------------------------------------------------------------------------------


def test_scaffold_by_hand():
    # Round 1, c = cᵢ = 0. Client 0: 0 → 0.1 → 0.19, c₀ = (0 − 0.19)/(2·0.1) = −0.95.
    # Client 1: 0 → −0.2, c₁ = 0.2/0.1 = 2. w = (1·0.19 − 3·0.2)/4 = −0.1025, c = (−0.95 + 2)/2 = 0.525.
    one, kept = run(Scaffold, 1)
    assert value(one.model) == pytest.approx(-0.1025, **NEAR)
    assert value(one.server_state["c"]) == pytest.approx(0.525, **NEAR)
    assert [value(kept[who], "c/head") for who in "01"] == pytest.approx([-0.95, 2.0], **NEAR)
    # Round 2, slope (w − 1) + 0.525 + 0.95 = w + 0.475: −0.1025 → −0.13975 → −0.173275.
    # c₀ = −0.95 − 0.525 + (−0.1025 + 0.173275)/0.2 = −1.121125, c = 0.525 + (−1.121125 + 0.95)/2 = 0.4394375.
    two, kept = run(Scaffold, 2, cohorts=THEN_ONE_ALONE)
    assert value(two.model) == pytest.approx(-0.173275, **NEAR)
    assert value(two.server_state["c"]) == pytest.approx(0.4394375, **NEAR)
    assert [value(kept[who], "c/head") for who in "01"] == pytest.approx([-1.121125, 2.0], **NEAR)


def test_scaffold_with_momentum_keeps_means_of_gradients():
    # ρ = 0.5, client 0: slope −1, w = 0.1; slope −0.9, velocity −0.5 − 0.9, w = 0.24. Its gradients count
    # 1.5 and 1 times, 2.5 together: c₀ = −0.24/(2.5·0.1) = −0.96 = (1.5·(−1) + 1·(−0.9))/2.5.
    _, kept = run(Scaffold, 1, momentum=0.5)
    assert value(kept["0"], "c/head") == pytest.approx(-0.96, **NEAR)
    assert value(kept["1"], "c/head") == pytest.approx(2.0, **NEAR)


def test_feddyn_by_hand():
    # α = 0.5. Round 1, hᵢ = 0. Client 0: 0 → 0.1; slope −0.9 + 0.5·0.1 = −0.85 → 0.185, h₀ = −0.0925.
    # Client 1: 0 → −0.2, h₁ = 0.1. Mean (both alike) −0.0075, h = −0.5·(−0.0075) = 0.00375 = (h₀ + h₁)/2,
    # w = −0.0075 − 0.00375/0.5 = −0.015.
    one, kept = run(FedDyn, 1, alpha=0.5)
    assert value(one.model) == pytest.approx(-0.015, **NEAR)
    assert value(one.h) == pytest.approx(0.00375, **NEAR)
    assert [value(kept[who], "h/head") for who in "01"] == pytest.approx([-0.0925, 0.1], **NEAR)
    # Round 2, client 0: slope −1.015 + 0.0925 = −0.9225 → 0.07725; slope −0.92275 + 0.0925 + 0.5·0.09225
    # = −0.784125 → 0.1556625. Δ = 0.1706625, h₀ = −0.0925 − 0.08533125 = −0.17783125,
    # h = 0.00375 − 0.5·0.1706625/2 = −0.038915625, w = 0.1556625 + 0.07783125 = 0.23349375.
    two, kept = run(FedDyn, 2, cohorts=THEN_ONE_ALONE, alpha=0.5)
    assert value(two.model) == pytest.approx(0.23349375, **NEAR)
    assert value(two.h) == pytest.approx(-0.038915625, **NEAR)
    assert [value(kept[who], "h/head") for who in "01"] == pytest.approx([-0.17783125, 0.1], **NEAR)


def test_fednova_by_hand():
    # Δ₀ = 0.19 in 2 steps, Δ₁ = −0.2 in 1. Mean step (0.19/2 − 3·0.2)/4 = −0.12625, mean number of steps
    # (2 + 3·1)/4 = 1.25: w = −0.1578125, where FedAvg's is −0.1025.
    assert value(run(FedNova, 1)[0].model) == pytest.approx(-0.1578125, **NEAR)
    assert value(run(FedAvg, 1)[0].model) == pytest.approx(-0.1025, **NEAR)
    # Round 2, client 0 alone: as FedAvg's, −0.1578125 + 0.19·1.1578125.
    two, _ = run(FedNova, 2, cohorts=THEN_ONE_ALONE)
    assert value(two.model) == pytest.approx(-0.1578125 + 0.19 * 1.1578125, **NEAR)


def test_fednova_with_momentum_by_hand():
    # ρ = 0.5, client 0: −1, then −0.5 − 0.9: w = 0.1 + 0.14 = 0.24, a₀ = 2.5. Client 1: −0.2, a₁ = 1.
    # (0.24/2.5 − 3·0.2)/4 · (2.5 + 3)/4 = −0.126 · 1.375
    assert value(run(FedNova, 1, momentum=0.5)[0].model) == pytest.approx(-0.126 * 1.375, **NEAR)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_accumulated_steps_are_what_sgd_does(momentum, steps):
    """With a constant slope of −1 and a rate of 1, SGD moves by just that."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
    for _ in range(steps):
        w.grad = torch.tensor(-1.0, dtype=torch.float64)
        optimizer.step()
    counted = accumulated(torch.tensor(float(steps), dtype=torch.float64), momentum)
    assert float(counted) == pytest.approx(w.item(), rel=1e-12)


# MOON's loss by hand --------------------------------------------------------------------------------------


class Seen:
    """A task whose representations are the parameters' own, and whose loss is 3."""

    def features(self, parameters, batch):
        return torch.zeros(2, 2), parameters["z"]

    def loss_of(self, logits, batch):
        return torch.tensor(3.0, dtype=torch.float64)


def rows(*vectors):
    return {"z": torch.tensor(vectors, dtype=torch.float64)}


def test_moon_by_hand():
    """Row 0: cos 1 with the global, 0 with the previous; row 1: cos 0.6 and −1. τ = 0.5, μ = 2."""
    here = rows([2.0, 0.0], [0.0, 1.0])
    start = Start(rows([1.0, 0.0], [0.8, 0.6]), ("z",), {}, {"previous": rows([0.0, 3.0], [0.0, -1.0])})
    each = [math.log(1 + math.exp((0 - 1) / 0.5)), math.log(1 + math.exp((-1 - 0.6) / 0.5))]
    batch = Batch({}, torch.zeros(2, dtype=torch.int64))
    method = Moon(mu=2.0, temperature=0.5)
    assert float(method.loss(here, batch, Seen(), start)) == pytest.approx(3 + 2 * sum(each) / 2, **NEAR)
    first_alone = replace(batch, mask=torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert float(method.loss(here, first_alone, Seen(), start)) == pytest.approx(3 + 2 * each[0], **NEAR)


def test_moon_without_a_previous_model_pulls_nowhere():
    method = Moon(mu=2.0, temperature=0.5)
    model = rows([1.0, 0.3], [0.8, 0.6])
    start = Start(model, ("z",), {}, method.start(model, {}))
    here = {"z": torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)}
    loss = method.loss(here, Batch({}, torch.zeros(2, dtype=torch.int64)), Seen(), start)
    (gradient,) = torch.autograd.grad(loss, here["z"])
    assert float(loss.detach()) == pytest.approx(3 + 2 * math.log(2), **NEAR) and not gradient.any()


# The references' formulas ---------------------------------------------------------------------------------

FOUR = (
    Quadratic(1.0, 1.0, examples=2, steps=3),
    Quadratic(3.0, -1.0, examples=2, steps=3),
    Quadratic(0.5, 4.0, examples=2, steps=3),
    Quadratic(2.0, 0.5, examples=2, steps=3),
)
COHORTS = [["0", "2"], ["1", "2", "3"], ["0", "3"], ["0", "1", "2", "3"]]


def descend(client, w, gradient, rate=0.1):
    for _ in range(client.steps):
        w = w - rate * (client.a * (w - client.b) + gradient(w))
    return w


def test_scaffold_is_the_reference_s():
    """As github.com/alpemreacar/FedDyn (MIT) has it: a list of all clients' states, and equal sizes."""
    w, c, states = 0.0, 0.0, np.zeros(4)
    for cohort in COHORTS:
        chosen = [int(name) for name in cohort]
        ends = {i: descend(FOUR[i], w, lambda _, pull=c - states[i]: pull) for i in chosen}
        news = {i: states[i] - c + (w - ends[i]) / (FOUR[i].steps * 0.1) for i in chosen}
        c += sum(news[i] - states[i] for i in chosen) / 4
        states[chosen] = [news[i] for i in chosen]
        w = np.mean([ends[i] for i in chosen])
    strategy, kept = run(Scaffold, 4, FOUR, cohorts=COHORTS)
    assert value(strategy.model) == pytest.approx(w, **NEAR)
    assert (
        value(strategy.server_state["c"]) == pytest.approx(c, **NEAR) == pytest.approx(states.mean(), **NEAR)
    )
    assert [value(kept[str(i)], "c/head") for i in range(4)] == pytest.approx(states, **NEAR)


def test_feddyn_is_the_reference_s():
    """The same code's other form: clients remember pᵢ = −hᵢ/α, and α‖w‖²/2 is weight decay."""
    alpha, w, remembered = 0.3, 0.0, np.zeros(4)
    for cohort in COHORTS:
        chosen = [int(name) for name in cohort]
        pulls = {i: alpha * (remembered[i] - w) for i in chosen}
        ends = {i: descend(FOUR[i], w, lambda x, pull=pulls[i]: pull + alpha * x) for i in chosen}
        for i in chosen:
            remembered[i] += ends[i] - w
        w = np.mean([ends[i] for i in chosen]) + remembered.mean()  # over all, drawn or not
    strategy, kept = run(FedDyn, 4, FOUR, cohorts=COHORTS, alpha=alpha)
    assert value(strategy.model) == pytest.approx(w, **NEAR)
    assert [value(kept[str(i)], "h/head") for i in range(4)] == pytest.approx(-alpha * remembered, **NEAR)


def test_fednova_is_the_reference_s():
    """NIID-Bench's (MIT), with unequal sizes and steps: w − (Σ aᵢpᵢ) Σ pᵢ (w − wᵢ)/aᵢ."""
    uneven = zip(FOUR, (1, 5, 2, 9), (4, 1, 3, 2), strict=True)
    clients = [replace(client, examples=examples, steps=steps) for client, examples, steps in uneven]
    w = 0.0
    for cohort in COHORTS:
        chosen = [clients[int(name)] for name in cohort]
        sizes = np.array([c.examples for c in chosen], dtype=float)
        shares, steps = sizes / sizes.sum(), np.array([c.steps for c in chosen], dtype=float)
        directions = np.array([w - descend(c, w, lambda _: 0.0) for c in chosen]) / steps
        w = w - (steps * shares).sum() * (shares * directions).sum()
    assert value(run(FedNova, 4, clients, cohorts=COHORTS)[0].model) == pytest.approx(w, **NEAR)


# Where rounds come to rest --------------------------------------------------------------------------------

LONG = (Quadratic(1.0, 1.0, examples=1, steps=10), Quadratic(4.0, -1.0, examples=1, steps=10))
BEST = (1 * 1 - 4 * 1) / 5  # of the mean of both


@pytest.mark.parametrize(
    "cohorts",
    [
        pytest.param(None, id="all"),
        pytest.param([["0"], ["0", "1"], ["1"]], id="some", marks=pytest.mark.slow),
    ],
)
def test_feddyn_rests_at_the_true_optimum(cohorts):
    strategy, _ = run(FedDyn, 60, LONG, alpha=2.0, cohorts=cohorts)
    assert value(strategy.model) == pytest.approx(BEST, abs=1e-9)


def test_fedavg_does_not():
    # It rests where the mean of Δᵢ = (1 − (1 − ηaᵢ)¹⁰)(bᵢ − w) is zero.
    slow, quick = 1 - 0.9**10, 1 - 0.6**10
    rests = value(run(FedAvg, 40, LONG)[0].model)
    assert rests == pytest.approx((slow - quick) / (slow + quick), abs=1e-9)  # −0.21
    assert abs(rests - BEST) > 0.3


def test_scaffold_rests_at_the_optimum_of_the_plain_mean_whatever_the_sizes():
    clients = (replace(LONG[0], examples=1, steps=5), replace(LONG[1], examples=9, steps=5))
    assert value(run(Scaffold, 150, clients)[0].model) == pytest.approx(BEST, abs=1e-9)


@pytest.mark.slow
def test_fednova_takes_the_bias_of_unequal_steps_away():
    """Δᵢ = (1 − (1 − ηaᵢ)ᴷ)(bᵢ − w): FedAvg rests where their mean is zero, FedNova where that of Δᵢ/K is."""
    clients = (replace(LONG[0], steps=1), replace(LONG[1], steps=20))
    nova, plain = (value(run(cls, 70, clients, lr=0.02)[0].model) for cls in (FedNova, FedAvg))
    slow, quick = 0.02, 1 - 0.92**20
    assert plain == pytest.approx((slow - quick) / (slow + quick), abs=1e-9)  # −0.95
    assert nova == pytest.approx((slow - quick / 20) / (slow + quick / 20), abs=1e-9)  # −0.34
    assert abs(nova - BEST) < abs(plain - BEST)


# Dropped clients, late joiners, lost states ---------------------------------------------------------------


def test_a_client_that_lost_its_control_variate_starts_at_zero():
    kept, seen = {}, {}

    def loses(strategy, row):
        if row["round"] == 2:
            kept.pop("0")
            seen.update(w=value(strategy.model), c=value(strategy.server_state["c"]))

    run(Scaffold, 3, cohorts=[["0"], ["0", "1"], ["0", "1"]], kept=kept, each=loses)  # and 1 came late
    w, c = seen["w"], seen["c"]
    end = descend(TWO[0], w, lambda _: c - 0)
    assert value(kept["0"], "c/head") == pytest.approx(0 - c + (w - end) / (2 * 0.1), **NEAR)


def test_a_client_that_lost_its_pull_starts_at_zero():
    kept, seen = {}, {}

    def loses(strategy, row):
        if row["round"] == 2:
            kept.pop("0")
            seen.update(w=value(strategy.model))

    run(FedDyn, 3, cohorts=[["0"], ["0", "1"], ["0", "1"]], kept=kept, each=loses, alpha=0.1)
    w = seen["w"]
    end = descend(TWO[0], w, lambda x: 0.1 * (x - w))
    assert value(kept["0"], "h/head") == pytest.approx(-0.1 * (end - w), **NEAR)


def test_a_round_without_replies_changes_nothing(monkeypatch):
    from fedfrozen_app.server import reply_check

    real = reply_check.problem_of
    monkeypatch.setattr(
        reply_check,
        "problem_of",
        lambda reply, request, *more: "was lost" if request.round == 2 else real(reply, request, *more),
    )
    for cls in (Scaffold, FedDyn, FedNova):
        seen = {}
        run(cls, 2, each=lambda s, row, seen=seen: seen.update({row["round"]: value(s.model)}))
        assert seen[2] == seen[1] != seen[0]


# Real models ----------------------------------------------------------------------------------------------

SGD = ["client=sgd", "client.momentum=0", "client.lr=0.05"]
FLOAT64 = ["model.dtype=float64", "model.config.num_hidden_layers=1"]
METHODS = {
    "scaffold": ["strategy=scaffold", "client.momentum=0.5"],
    "feddyn": ["strategy=feddyn", "strategy.alpha=0.1"],
    "fednova": ["strategy=fednova", "client.local_epochs=2"],
    "moon": ["strategy=moon", *SGD],
}


@pytest.mark.parametrize("name", ["scaffold", "feddyn", *slowly("fednova", "moon")])
def test_the_strategy_alone_runs_without_a_network(train, name):
    run = train(f"strategy={name}", "num_rounds=1")
    assert run.rows[-1]["clients_failed"] == 0 and math.isfinite(run.rows[-1]["test_loss"])
    assert run.summary["config"]["strategy"]["name"] == name


@pytest.mark.parametrize("name", ["scaffold", *slowly("feddyn", "fednova", "moon")])
def test_both_runners_agree(train, name):
    words = [*METHODS[name], *FLOAT64, "num_rounds=3", "participation=0.7", "partition.alpha=0.2"]
    one, other = (train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort"))
    states = assert_alike(one, other)
    ends = [checkpoint.newest(run.folder).strategy for run in (one, other)]
    assert ends[0].keys() == ends[1].keys()
    for key, array in ends[0].items():
        assert float((ends[1][key] - array).norm()) <= 1e-9 * max(1.0, float(array.norm())), key
    whole, row = sum(v.nbytes for v in one.model.values()), one.rows[-1]
    sent = 2 if name == "scaffold" else 1
    assert sum(row["bytes_up_by_role"].values()) == sent * whole * len(row["clients"])
    assert (len(states) > 1) == (name != "fednova")  # who keeps something


@pytest.mark.parametrize("name", ["feddyn", *slowly("scaffold", "fednova", "moon")])
def test_killed_and_resumed_to_the_bit(train, monkeypatch, name):
    words = (*METHODS[name], "num_rounds=3", "participation=0.7", "model.config.num_hidden_layers=1")
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="killed")
    again = train(*words, folder="killed", resume=True)
    one, other = checkpoint.newest(whole.folder), checkpoint.newest(again.folder)
    assert same_bits(one.model, other.model) and same_bits(one.strategy, other.strategy)
    assert one.clients.keys() == other.clients.keys()
    assert all(same_bits(one.clients[who], other.clients[who]) for who in one.clients)


def test_what_each_equals(train):
    words = [*SGD, "num_rounds=2", "model.config.num_hidden_layers=1"]
    plain = train("strategy=fedavg", *words, folder="plain")
    first = plain.model_after(1)
    moon = train("strategy=moon", *words, folder="moon")
    none = train("strategy=moon", "strategy.mu=0", *words, folder="none")
    assert same_bits(none.model, plain.model)
    assert same_bits(moon.model_after(1), first) and not same_bits(moon.model, plain.model)
    scaffold = train("strategy=scaffold", *words, folder="scaffold")
    assert same_bits(scaffold.model_after(1), first) and not same_bits(scaffold.model, plain.model)


def test_fednova_with_equal_steps_is_fedavg(train):
    words = [*SGD, *FLOAT64, "num_rounds=2", "client.momentum=0.9", "client.local_steps=2"]
    words += ["partition.min_size=40"]
    plain, nova = (train(f"strategy={s}", *words, folder=s) for s in ("fedavg", "fednova"))
    assert nova.rows[1]["accumulated_steps"] == pytest.approx(2.9)  # 1.9 + 1
    for name, array in plain.model.items():
        torch.testing.assert_close(nova.model[name], array, rtol=1e-12, atol=1e-14)


def test_moon_is_the_reference_s_with_a_real_model(train):
    """QinbinLi/MOON (MIT): cosines side by side, over τ, and cross-entropy against the first. Two rounds of
    one full batch a client, client by client with plain torch."""
    words = [*FLOAT64, *SGD, "strategy=moon", "strategy.mu=3", "num_clients=2", "num_rounds=2"]
    words += ["client.batch_size=512", "client.local_epochs=2", "dataset.client_validation=0"]
    ran = train(*words)
    config = read(resolved(compose_config([*SMALL, *words])))
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, 2))
    similarity = torch.nn.CosineSimilarity(dim=-1)
    head = [module for module in worker.model.modules() if isinstance(module, torch.nn.Linear)][-1]

    def outputs(weights, inputs):
        read_by_head = []
        hook = head.register_forward_hook(lambda module, given, output: read_by_head.append(given[0]))
        logits = functional_call(worker.model, weights, args=(), kwargs=inputs).logits
        hook.remove()
        return read_by_head[0], logits

    model = {name: array.clone() for name, array in worker.initial().items()}
    previous = {}
    for number in (1, 2):
        rate = 0.05 * (1.0 if number == 1 else 0.1)  # the cosine's beginning and end
        ends, sizes = [], []
        for who in "01":
            index = worker.rows(who).train
            inputs, labels = worker.take(index)
            inputs = worker.task.prepare(inputs)
            w = {name: array.clone().requires_grad_(True) for name, array in model.items()}
            for _ in range(2):
                z, logits = outputs(w, inputs)
                loss = functional.cross_entropy(logits, labels)
                if who in previous:
                    pairs = [similarity(z, outputs(m, inputs)[0]) for m in (model, previous[who])]
                    pairs = torch.cat([pair.reshape(-1, 1) for pair in pairs], dim=1) / 0.5
                    loss = loss + 3 * functional.cross_entropy(pairs, torch.zeros(len(labels)).long())
                gradients = torch.autograd.grad(loss, list(w.values()))
                w = {
                    name: (array - rate * gradient).detach().requires_grad_(True)
                    for (name, array), gradient in zip(w.items(), gradients, strict=True)
                }
            previous[who] = {name: array.detach() for name, array in w.items()}
            ends.append(previous[who])
            sizes.append(len(index))
        model = {n: sum(k * end[n] for k, end in zip(sizes, ends, strict=True)) / sum(sizes) for n in model}
    for name, array in model.items():
        torch.testing.assert_close(ran.model[name], array, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["scaffold", *slowly("feddyn", "fednova", "moon")])
def test_frozen_names_are_in_none_of_their_arrays(train, monkeypatch, name):
    method = registry.find("strategies", name)

    class Both(method, FedFrozen):
        Settings = FedFrozen.Settings

    if fields(method.Settings):
        Both.Settings = dataclass(frozen=True)(type("Both", (method.Settings, FedFrozen.Settings), {}))
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedfrozen"), Both)
    words = ["strategy=fedfrozen", "strategy.warmup_rounds=1", *SGD, "num_rounds=3", "checkpoint.keep=9"]
    run = train(*words, "client.weight_decay=0")
    warm, frozen = (checkpoint.read(run.folder / "checkpoints" / number) for number in "13")

    def kernel(names):
        return [key for key in names if "q_proj" in key or "k_proj" in key]

    assert kernel(warm.strategy) or name in ("fednova", "moon")
    assert not kernel(frozen.strategy) and bool(frozen.strategy) == bool(warm.strategy)
    assert all(own and not kernel(own) for own in frozen.clients.values())
    assert not {"query", "key"} & set(run.rows[-1]["bytes_up_by_role"])
    for key in kernel(run.model):
        assert torch.equal(run.model[key], run.model_after(1)[key])


# What is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strategy=scaffold", "client=adamw"], "client.optimizer=adamw would make it wrong"),
        (["strategy=scaffold", "client.weight_decay=0.1"], "set client.weight_decay=0"),
        (["strategy=scaffold", "client.clip=1"], "set client.clip=null"),
        (["strategy=scaffold", "client.head_lr=1"], "set client.head_lr=null"),
        (["strategy=fednova", "client=adamw"], "strategy=fednova counts the steps of SGD"),
        (["strategy=fednova", "aggregation=median"], "choose aggregation=mean"),
        (["strategy=fednova", "model.dtype=bfloat16"], "model.dtype=bfloat16 would round away"),
        (["strategy=feddyn", "strategy.alpha=0"], "strategy.alpha=0"),
        (["strategy=moon", "strategy.temperature=0"], "strategy.temperature=0"),
        (["strategy=moon", "strategy.mu=-1"], "strategy.mu=-1"),
    ],
)
def test_what_would_be_wrong_is_refused(words, says):
    with pytest.raises(UserError) as refused:
        read(resolved(compose_config(words)))
    assert says in str(refused.value)


@pytest.mark.parametrize("name", METHODS)
def test_privacy_covers_none_of_them_yet(train, name):
    with pytest.raises(UserError, match="choose another strategy, or privacy=none"):
        train(f"strategy={name}", "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=1")


def test_moon_needs_one_representation_a_row():
    class Tokens(Seen):
        def features(self, parameters, batch):
            return torch.zeros(2, 3, 2), torch.zeros(2, 3, 4)

    start = SimpleNamespace(anchor={}, own={"previous": {}})
    with pytest.raises(UserError, match="one for each token"):
        Moon(1.0, 0.5).loss({}, None, Tokens(), start)
