"""Methods with client steps of their own, or with the loss and gradient of a round's start.

By hand (see quadratics.py): client 0 has 1 example, f = ½(w − 1)² and 2 steps; client 1 has 3 examples,
f = (w + 1)² and 1 step; the rate is 0.1 and w begins at 0. In round 2 client 0 is alone.
"""

import math

import numpy as np
import pytest
import torch

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.names import by_namespace
from fedfrozen_app.exchange.plan import Phase
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Algorithm
from strategies.fedavg import FedAvg
from strategies.local_momentum import LocalMomentum
from strategies.mimelite import MimeLite
from strategies.qfedavg import QFedAvg
from strategies.term import TERM
from tests.comparing import assert_alike
from tests.conftest import same_bits, slowly
from tests.resuming import killed_before_checkpoint
from tests.strategies.by_hand import (  # noqa: F401
    LR,
    assert_same,
    descend,
    gradient,
    hand,
    kept_by,
    loss_and_gradient,
    mean,
)
from tests.strategies.quadratics import Quadratic, run, value

THEN_ONE_ALONE = [["0", "1"], ["0"]]
NEAR = {"abs": 1e-12}
FLOAT64 = ["model.dtype=float64", "model.config.num_hidden_layers=1"]
METHODS = {
    "local_momentum": ["strategy=local_momentum", "client.lr=0.05", "client.local_epochs=2"],
    "mimelite": ["strategy=mimelite", "client.lr=0.05", "client.local_epochs=2"],
    "qfedavg": ["strategy=qfedavg", "client=sgd", "client.lr=0.05", "client.momentum=0"],
    "term": ["strategy=term", "client=sgd", "client.lr=0.05", "client.momentum=0", "strategy.t=2"],
}
KEEPS = {"local_momentum"}


# Rounds by hand -------------------------------------------------------------------------------------------


def test_local_momentum_by_hand():
    # β = 0.5. Client 0: gradient −1, m = −1, w = 0.1; gradient −0.9, m = −0.5 − 0.9 = −1.4, w = 0.24.
    # Client 1: gradient 2, m = 2, w = −0.2. The mean (0.24 − 3·0.2)/4 = −0.09.
    one, kept = run(LocalMomentum, 1, beta=0.5)
    assert value(one.model) == pytest.approx(-0.09, **NEAR)
    assert [value(kept[who], "m/head") for who in "01"] == pytest.approx([-1.4, 2.0], **NEAR)
    # Round 2, client 0 with its m: gradient −1.09, m = −0.7 − 1.09 = −1.79, w = 0.089; gradient −0.911,
    # m = −0.895 − 0.911 = −1.806, w = 0.2696.
    two, kept = run(LocalMomentum, 2, cohorts=THEN_ONE_ALONE, beta=0.5)
    assert value(two.model) == pytest.approx(0.2696, **NEAR)
    assert [value(kept[who], "m/head") for who in "01"] == pytest.approx([-1.806, 2.0], **NEAR)


def test_local_momentum_without_momentum_is_fedavg():
    none, plain = run(LocalMomentum, 3, beta=0.0)[0], run(FedAvg, 3)[0]
    assert value(none.model) == pytest.approx(value(plain.model), **NEAR)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_local_momentum_of_a_network_by_hand(hand, runner):  # noqa: F811
    """Three rounds of two of three clients: who is away keeps its m."""
    case = hand("strategy=local_momentum", "strategy.beta=0.7", f"client.lr={LR}")
    ran = case.run(runner)
    w, m = case.start, {who: {name: 0 * value for name, value in case.start.items()} for who in case.rows}
    for cohort in case.cohorts:
        ends = []
        for who in cohort:
            own = w
            for _ in range(3):
                g = gradient(own, *case.rows[who])
                m[who] = {name: 0.7 * m[who][name] + g[name] for name in g}
                own = {name: own[name] - LR * m[who][name] for name in own}
            ends.append(own)
        w = mean(ends, [case.count(who) for who in cohort])
    assert_same(ran.model, w)
    for who in case.rows:
        assert_same(kept_by(ran, who, "m"), m[who])


def test_mimelite_by_hand():
    # β = 0.5, m = 0: steps of half the gradient. Client 0: 0 → 0.05 → 0.05 + 0.1·0.5·0.95 = 0.0975. Client 1:
    # 0 → −0.1. The mean (0.0975 − 0.3)/4 = −0.050625. m = 0.5·(−1 + 3·2)/4 = 0.625.
    one, kept = run(MimeLite, 1, beta=0.5)
    assert value(one.model) == pytest.approx(-0.050625, **NEAR)
    assert value(one.server_state["m"]) == pytest.approx(0.625, **NEAR)
    assert not any(kept.values())
    # Round 2, client 0: w ← w − 0.1·(0.5 (w − 1) + 0.3125), twice; m = 0.5·(−1.050625) + 0.5·0.625.
    w = -0.050625
    for _ in range(2):
        w -= 0.1 * (0.5 * (w - 1) + 0.3125)
    two, _ = run(MimeLite, 2, cohorts=THEN_ONE_ALONE, beta=0.5)
    assert value(two.model) == pytest.approx(w, **NEAR)
    assert value(two.server_state["m"]) == pytest.approx(0.5 * -1.050625 + 0.3125, **NEAR)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_mimelite_of_a_network_by_hand(hand, runner):  # noqa: F811
    case = hand("strategy=mimelite", "strategy.beta=0.6", f"client.lr={LR}")
    ran = case.run(runner)
    w, m = case.start, {name: 0 * value for name, value in case.start.items()}
    for cohort in case.cohorts:
        ends, counts = [], [case.count(who) for who in cohort]
        for who in cohort:
            own = w
            for _ in range(3):
                g = gradient(own, *case.rows[who])
                own = {name: own[name] - LR * (0.4 * g[name] + 0.6 * m[name]) for name in own}
            ends.append(own)
        full = mean([gradient(w, *case.rows[who]) for who in cohort], counts)
        m = {name: 0.4 * full[name] + 0.6 * m[name] for name in m}
        w = mean(ends, counts)
    assert_same(ran.model, w)
    state = checkpoint.newest(ran.folder).strategy
    for name, expected in m.items():
        (found,) = (array for key, array in state.items() if key.rpartition("/")[2] == name)
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-9)


def test_qfedavg_by_hand():
    # Both names of the model train: F₀ = 2·½ = 1, F₁ = 2·1 = 2, L = 10, q = 2.
    # Client 0: w₀ = 0.19, Δ = −1.9, ‖Δ‖² = 2·3.61, h = 2·1·7.22 + 10·1 = 24.44.
    # Client 1: w₁ = −0.2, Δ = 2, ‖Δ‖² = 8, h = 2·2·8 + 10·4 = 72.
    # w = −(1·1·(−1.9) + 3·4·2)/(24.44 + 3·72) = −22.1/240.44.
    one, _ = run(QFedAvg, 1, q=2.0)
    assert value(one.model) == pytest.approx(-22.1 / 240.44, **NEAR)
    # Round 2, client 0 alone: F = (w − 1)², Δ = 10·0.19·(w − 1), h = 2F‖Δ‖² + 10F².
    w = -22.1 / 240.44
    loss, delta = (w - 1) ** 2, 1.9 * (w - 1)
    w -= loss**2 * delta / (2 * loss * 2 * delta**2 + 10 * loss**2)
    two, _ = run(QFedAvg, 2, cohorts=THEN_ONE_ALONE, q=2.0)
    assert value(two.model) == pytest.approx(w, **NEAR)


def test_qfedavg_with_another_step_size_by_hand():
    # L = 5 with the same rate: Δ = −0.95 and 1, h = 2·1.805 + 5 = 8.61 and 2·2·2 + 5·4 = 28.
    one, _ = run(QFedAvg, 1, q=2.0, lipschitz=5.0)
    assert value(one.model) == pytest.approx(-(-0.95 + 3 * 4) / (8.61 + 3 * 28), **NEAR)


@pytest.mark.parametrize("cls", [QFedAvg, MimeLite])
def test_without_their_setting_they_are_fedavg(cls):
    zero = {"q": 0.0} if cls is QFedAvg else {"beta": 0.0}
    assert value(run(cls, 3, **zero)[0].model) == pytest.approx(value(run(FedAvg, 3)[0].model), **NEAR)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_qfedavg_of_a_network_by_hand(hand, runner):  # noqa: F811
    case = hand("strategy=qfedavg", "strategy.q=1.5", "strategy.lipschitz=3")
    ran, w = case.run(runner), case.start
    for cohort in case.cohorts:
        sums, total = dict.fromkeys(w, 0.0), 0.0
        for who in cohort:
            loss = loss_and_gradient(w, *case.rows[who])[0]
            end, count = descend(w, *case.rows[who]), case.count(who)
            delta = {name: 3 * (w[name] - end[name]) for name in w}
            sums = {name: sums[name] + count * loss**1.5 * delta[name] for name in w}
            norm = sum((value**2).sum() for value in delta.values())
            total += count * (1.5 * loss**0.5 * norm + 3 * loss**1.5)
        w = {name: w[name] - sums[name] / total for name in w}
    assert_same(ran.model, w)


def test_term_by_hand():
    # Both names of the model train: F₀ = 1, F₁ = 2, t = 0.5. FedAvg's updates 0.19 and −0.2, weighted by
    # 1·exp(0.5) and 3·exp(1).
    weights = math.exp(0.5), 3 * math.exp(1.0)
    one, _ = run(TERM, 1, t=0.5)
    assert value(one.model) == pytest.approx((0.19 * weights[0] - 0.2 * weights[1]) / sum(weights), **NEAR)
    two, _ = run(TERM, 2, cohorts=THEN_ONE_ALONE, t=0.5)
    w = value(one.model)
    assert value(two.model) == pytest.approx(w + 0.19 * (1 - w), **NEAR)
    assert value(run(TERM, 3, t=0.0)[0].model) == pytest.approx(value(run(FedAvg, 3)[0].model), **NEAR)


def test_term_does_not_overflow():
    far = (Quadratic(1.0, 1e3, steps=1), Quadratic(1.0, -1.0, steps=1))
    # F₀ − F₁ = 1e6 − 1: the weights are 1 and exp(−30).
    w = value(run(TERM, 1, far, t=10.0)[0].model)
    small = math.exp(-30)
    assert w == pytest.approx((100 - 0.1 * small) / (1 + small), abs=1e-9)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_term_of_a_network_by_hand(hand, runner):  # noqa: F811
    case = hand("strategy=term", "strategy.t=1.5")
    ran, w = case.run(runner), case.start
    for cohort, row in zip(case.cohorts, ran.rows[1:], strict=True):
        losses = [loss_and_gradient(w, *case.rows[who])[0] for who in cohort]
        counts = [case.count(who) for who in cohort]
        weights = [n * math.exp(1.5 * loss) for n, loss in zip(counts, losses, strict=True)]
        w = mean([descend(w, *case.rows[who]) for who in cohort], weights)
        shares = np.array(weights) / sum(weights)
        assert row["effective_clients"] == pytest.approx(1 / (shares**2).sum())
        assert row["start_loss"] == pytest.approx(np.average(losses, weights=counts))
    assert_same(ran.model, w)


def test_a_weight_that_is_no_positive_number_sets_a_reply_aside():
    class Odd(FedAvg):
        def client_weight(self, client, examples, metrics):
            return 0.0 if client == "0" else float(examples)

    rows = []
    one, _ = run(Odd, 1, each=lambda strategy, row: rows.append(row))
    assert value(one.model) == pytest.approx(-0.2, **NEAR)
    (failure,) = rows[-1]["failures"]
    assert "Client 0 was set aside: it would count 0 times in the mean" in failure


def test_start_values_are_those_of_all_rows_in_chunks(train, monkeypatch):
    """Rows that do not fit at once, and class weights: the same run within rounding."""
    words = [*METHODS["qfedavg"], *FLOAT64, "num_rounds=2", "client.class_weights=true"]
    whole = train(*words, folder="whole")
    monkeypatch.setattr("fedfrozen_app.local.start_values.ROWS", 7)
    chunks = train(*words, folder="chunks")
    for name, array in whole.model.items():
        torch.testing.assert_close(chunks.model[name], array, rtol=1e-9, atol=1e-12)


# Runners, phases, clipping, resuming ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local_momentum", *slowly("mimelite", "qfedavg", "term")])
def test_both_runners_agree(train, name):
    words = [*METHODS[name], *FLOAT64, "num_rounds=3", "participation=0.7", "partition.alpha=0.2"]
    words += ["client.clip=0.5"]
    one, other = (train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort"))
    states = assert_alike(one, other)
    assert (len(states) > 1) == (name in KEEPS)
    ends = [checkpoint.newest(run.folder) for run in (one, other)]
    for key, array in ends[0].strategy.items():
        torch.testing.assert_close(ends[1].strategy[key], array, rtol=1e-9, atol=1e-12)
    for who, arrays in ends[0].clients.items():
        for key, array in arrays.items():
            torch.testing.assert_close(ends[1].clients[who][key], array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["local_momentum", *slowly("mimelite", "qfedavg", "term")])
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


class Swapped(Algorithm):
    """A step that returns what it was given: the last step's parameters become the state, of one round."""

    client_state, step_state = ("kept",), ("kept", "steps")

    def step(self, parameters, gradient, state, start, lr):
        steps = {name: n + 1 for name, n in state["steps"].items()}
        new = {name: value - lr * steps[name] * gradient[name] for name, value in parameters.items()}
        return new, {"kept": parameters, "steps": steps}


class InPhases(FedAvg):
    algorithm = "swapped"

    def plan(self, server_round):
        plan = super().plan(server_round)
        head = tuple(name for name in plan.trained if self.federation.roles[name].kind == "head")
        body = tuple(name for name in plan.trained if name not in head)
        return plan.in_phases(Phase(head, epochs=2), Phase(body))


@pytest.mark.parametrize("phases", [True, *slowly(False)])
def test_state_of_one_round_and_phases_in_both_runners(train, monkeypatch, phases):
    method = InPhases if phases else type("Whole", (FedAvg,), {"algorithm": "swapped"})
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), method)
    monkeypatch.setitem(registry.REGISTERED, ("algorithms", "swapped"), Swapped)
    words = [*FLOAT64, "strategy=fedavg", "client=sgd", "client.momentum=0", "client.lr=0.02", "num_rounds=2"]
    one, other = (train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort"))
    for name, array in one.model.items():
        torch.testing.assert_close(other.model[name], array, rtol=1e-9, atol=1e-12)
    ends = [checkpoint.newest(run.folder).clients for run in (one, other)]
    for who, arrays in ends[0].items():
        assert set(by_namespace(arrays)) == {"kept"}  # and no "steps", which ends with the round
        for key, array in arrays.items():
            torch.testing.assert_close(ends[1][who][key], array, rtol=1e-9, atol=1e-12)


# What is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strategy=local_momentum", "client=adamw"], "takes its own local steps, so client.optimizer=adamw"),
        (["strategy=local_momentum", "client.momentum=0.9"], "set client.momentum=0"),
        (["strategy=local_momentum", "client.weight_decay=0.1"], "set client.weight_decay=0"),
        (["strategy=local_momentum", "client.head_lr=1"], "set client.head_lr=null"),
        (["strategy=local_momentum", "strategy.beta=2"], "strategy.beta=2"),
        (["strategy=mimelite", "client=adamw"], "takes its own local steps, so client.optimizer=adamw"),
        (["strategy=qfedavg", "strategy.q=-1"], "strategy.q=-1"),
        (["strategy=qfedavg", "aggregation=median"], "choose aggregation=mean"),
        (["strategy=term", "aggregation=krum"], "choose aggregation=mean"),
        (["strategy=term", "secure_aggregation=on"], "strategy=term weights updates one by one"),
    ],
)
def test_what_would_be_wrong_is_refused(words, says):
    with pytest.raises(UserError) as refused:
        read(resolved(compose_config(words)))
    assert says in str(refused.value)


def test_a_step_beside_trainable_state_is_refused(monkeypatch):
    class Both(Swapped):
        client_state, trainable_state, step_state = ("v",), ("v",), ()

    monkeypatch.setitem(registry.REGISTERED, ("algorithms", "both"), Both)
    method = type("WithBoth", (FedAvg,), {"algorithm": "both"})
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), method)
    with pytest.raises(UserError, match="leave step or trainable_state out"):
        read(resolved(compose_config(["strategy=fedavg", "client=sgd", "client.momentum=0"])))


# The losses that are reported -----------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_train_loss_is_the_task_s_and_the_rest_is_the_surrogate(hand, runner):  # noqa: F811
    """FedProx: in every step f(w) is reported, and (μ/2)‖w − w_t‖² beside it."""
    case = hand("strategy=fedprox", "strategy.mu=0.3")
    ran, w = case.run(runner), case.start
    for cohort, row in zip(case.cohorts, ran.rows[1:], strict=True):
        ends, own, added, counts = [], [], [], [case.count(who) for who in cohort]
        for who in cohort:
            v, losses, terms = w, [], []
            for _ in range(3):
                loss, g = loss_and_gradient(v, *case.rows[who])
                losses.append(loss)
                terms.append(0.15 * sum(((v[name] - w[name]) ** 2).sum() for name in w))
                v = {name: v[name] - LR * (g[name] + 0.3 * (v[name] - w[name])) for name in v}
            ends.append(v)
            own.append(np.mean(losses))
            added.append(np.mean(terms))
        assert row["train_loss"] == pytest.approx(np.average(own, weights=counts), abs=1e-9)
        assert row["surrogate_loss"] == pytest.approx(np.average(added, weights=counts), abs=1e-9)
        w = mean(ends, counts)


def test_a_plain_method_reports_no_surrogate(train):
    assert "surrogate_loss" not in train("strategy=fedavg", "num_rounds=1").rows[-1]


# Differential privacy and secure sums ---------------------------------------------------------------------

PRIVATE = ["privacy=dp_sgd", "privacy.seeded_noise=true"]


@pytest.mark.parametrize("name", ["mimelite", "qfedavg", "term"])
def test_privacy_covers_no_unnoised_loss_or_gradient(train, name):
    why = (
        "takes its own" if name == "mimelite" else "reads the loss or gradient of all its rows, without noise"
    )
    with pytest.raises(UserError, match=why):
        train(*METHODS[name], *PRIVATE, "num_rounds=1")


@pytest.mark.parametrize(
    "more", [["privacy.audited=0"], ["secure_aggregation=on", "secure_aggregation.noise=sum"]]
)
def test_audits_and_noise_in_the_sum_know_no_own_steps(more):
    with pytest.raises(UserError, match="knows those of plain SGD alone"):
        read(resolved(compose_config(["strategy=local_momentum", *PRIVATE, *more])))


def test_a_private_step_is_given_noised_gradients(train):
    """Both private runners: with β = 0 the bits of private FedAvg's model within rounding, with β > 0 others;
    and the momentum stays with the client, and is in no reply."""
    words = [*FLOAT64, *PRIVATE, "num_rounds=2", "client.lr=0.05", "client.local_epochs=2"]
    plain = train("strategy=fedavg", "client=sgd", "client.momentum=0", *words, folder="plain")
    none = train("strategy=local_momentum", "strategy.beta=0", *words, folder="none")
    runs = [
        train("strategy=local_momentum", *words, f"runtime.runner={r}", folder=r)
        for r in ("sequential", "cohort")
    ]
    for name, array in plain.model.items():
        torch.testing.assert_close(none.model[name], array, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(runs[0].model[name], runs[1].model[name], rtol=1e-9, atol=1e-12)
    assert not same_bits(runs[0].model, plain.model)
    assert runs[0].rows[-1]["bytes_up"] == plain.rows[-1]["bytes_up"]
    assert runs[0].rows[-1]["epsilon"] == plain.rows[-1]["epsilon"]
    ends = [checkpoint.newest(run.folder).clients for run in runs]
    assert ends[0] and ends[0].keys() == ends[1].keys()
    for who, arrays in ends[0].items():
        assert set(by_namespace(arrays)) == {"m"}
        for key, array in arrays.items():
            torch.testing.assert_close(ends[1][who][key], array, rtol=1e-9, atol=1e-12)


def test_qfedavg_under_secure_sums_is_the_plain_run_within_rounding(train):
    words = [*METHODS["qfedavg"], "num_rounds=2", "model.config.num_hidden_layers=1"]
    plain = train(*words, "runtime.runner=sequential", folder="plain")
    masked = train(*words, "secure_aggregation=on", "secure_aggregation.min_cohort=3", folder="masked")
    assert masked.rows[-1]["qfedavg_h"] == pytest.approx(plain.rows[-1]["qfedavg_h"], rel=1e-3)
    for name, array in plain.model.items():
        torch.testing.assert_close(masked.model[name], array, rtol=0, atol=1e-4)
