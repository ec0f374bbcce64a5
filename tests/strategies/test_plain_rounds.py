"""FedAvg, FedProx, FedFrozen, FedPart and each client alone: rounds of two of three clients by hand."""

import pytest

from tests.conftest import slowly
from tests.strategies.by_hand import (  # noqa: F401
    BODY,
    EPOCHS,
    HEAD,
    LR,
    assert_same,
    descend,
    gradient,
    hand,
    kept_by,
    mean,
)

# Of two runners that are alike one is enough, but for the plainest rule.
BOTH = pytest.mark.parametrize("runner", ["sequential", "cohort"])
ONE = pytest.mark.parametrize("runner", ["cohort", *slowly("sequential")])
MU = 0.7


def prox(w, x, y):
    """w ← w − η(∇f(w) + μ(w − w_t)), the slope of f + (μ/2)‖w − w_t‖²."""
    start = w
    for _ in range(EPOCHS):
        g = gradient(w, x, y)
        w = {name: value - LR * (g[name] + MU * (value - start[name])) for name, value in w.items()}
    return w


def averaged(known, local_work):
    """`local_work(w, x, y, stage)` is one client's round."""
    w = known.start
    for number, cohort in enumerate(known.cohorts):
        trained = [local_work(w, *known.rows[client], number) for client in cohort]
        w = mean(trained, [known.count(client) for client in cohort])
    return w


@BOTH
def test_fedavg_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=fedavg")
    found = known.run(runner)
    assert_same(found.model, averaged(known, lambda w, x, y, number: descend(w, x, y)))


@ONE
def test_fedprox_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=fedprox", f"strategy.mu={MU}")
    found = known.run(runner)
    assert_same(found.model, averaged(known, lambda w, x, y, number: prox(w, x, y)))


@ONE
def test_fedfrozen_by_hand(hand, runner):  # noqa: F811
    """The body plays the kernel: it trains in the first round and in no other, under decay too."""
    known = hand("strategy=fedfrozen", "strategy.warmup_rounds=1", "model.source=attentive")
    found = known.run(runner)
    names = [(*BODY, *HEAD), HEAD, HEAD]
    assert_same(found.model, averaged(known, lambda w, x, y, number: descend(w, x, y, names[number])))


@ONE
def test_fedpart_by_hand(hand, runner):  # noqa: F811
    """A full round, then the groups in turn, shallow to deep: without layers they are roles."""
    words = ("strategy.full_rounds=1", "strategy.group_rounds=1", "strategy.between_rounds=0")
    known = hand("strategy=fedpart", *words)
    found = known.run(runner)
    names = [(*BODY, *HEAD), BODY, HEAD]
    assert_same(found.model, averaged(known, lambda w, x, y, number: descend(w, x, y, names[number])))


@ONE
def test_each_alone_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=local")
    found, own = known.run(runner), {}
    for cohort in known.cohorts:
        own |= {client: descend(own.get(client, known.start), *known.rows[client]) for client in cohort}
    for client, w in own.items():
        assert_same(kept_by(found, client), w)
    assert found.rows[-1]["bytes_up_by_role"] == {}
