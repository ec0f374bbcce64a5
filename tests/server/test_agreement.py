"""The rule of `strategy.warmup_rounds=auto`: on streams whose answer is known, and in real runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import ClientConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.server.agreement import DECAY, Agreement, Rule, follow, freeze_after, ratio, still_learns
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.federation import Federation
from strategies.fedfrozen import FedFrozen, Settings
from tests.conftest import SMALL, Run, same_bits

RULE = Rule(minimum=4, span=1)
WIDTH = 20_000


def watch(signals, noise, clients=10, rule=RULE, seed=0):
    """An Agreement that saw rounds in which every client moves by a common vector and one of its own.

    `signals` are the lengths of the common movement, `noise` that of each client's own, on average.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.ones(WIDTH, dtype=torch.float64) / WIDTH**0.5
    seen, figures = Agreement(rule), []
    for number, signal in enumerate(signals, start=1):
        own = torch.randn(clients, WIDTH, generator=generator, dtype=torch.float64) * noise / WIDTH**0.5
        updates = signal * direction + own
        mean = updates.mean(0)
        spread = updates.square().sum(1).mean() - mean.square().sum()
        drift = {"rms": spread.clamp(min=0).sqrt().item(), "mean_update": mean.norm().item()}
        row = {"round": number, "effective_clients": clients, "drift": {"kernel": drift}, "train_loss": 1.0}
        figures.append(seen.add(row, "kernel", {"query": mean}))
    return seen, figures


# Streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 10, pytest.param(100, marks=pytest.mark.slow)])
def test_pure_noise_freezes_soon_whatever_the_cohort(clients):
    seen, figures = watch([0.0] * 30, noise=1.0, clients=clients)
    assert seen.last_round is not None and seen.last_round < 15
    # A naive reading takes the mean's own noise for movement: a small cohort would look like signal.
    assert figures[20]["agreement"] < 0.02 * figures[20]["drift"] * 10 / clients


@pytest.mark.parametrize("clients", [2, 10])
def test_pure_signal_never_freezes(clients):
    seen, figures = watch([1.0] * 40, noise=0.0, clients=clients)
    assert seen.last_round is None  # no positive drift
    assert (figures[-1]["agreement"] == pytest.approx(1.0) and figures[-1]["ratio"] is None) or (
        figures[-1]["ratio"] > 1e6
    )
    seen, _ = watch([1.0] * 40, noise=1.0, clients=clients)
    assert seen.last_round is None  # drift as large as the movement


@pytest.mark.parametrize("clients", [2, 10])
def test_a_signal_that_decays_freezes_after_it_has_gone(clients):
    signals = [0.85**number for number in range(80)]
    last = watch(signals, noise=1.0, clients=clients)[0].last_round
    # 0.85^(2t) < 0.005 from t = 17 on; the memory of d and the window come late by some rounds.
    assert 17 <= last <= 40


def test_both_estimates_of_the_common_movement_are_unbiased():
    _, figures = watch([0.5] * 400, noise=1.0, clients=2, rule=Rule(minimum=400))
    for key in ("agreement", "signal"):
        mean = sum(each[key] for each in figures[10:]) / 390
        assert mean == pytest.approx(0.25, abs=0.01), key


def test_the_running_direction_by_hand():
    direction = {}
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])
    assert follow(direction, {"q": one}) == 1.0
    assert follow(direction, {"q": two}) == 3.0
    expected = DECAY * one + (1 - DECAY) * two
    torch.testing.assert_close(direction["q"], expected)


def test_window_patience_minimum_and_cap_by_hand():
    drift, flat = [1.0] * 8, [1.0] * 8
    agreement = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    usual = {"threshold": 0.1, "window": 2, "patience": 2, "span": 1}
    rule = Rule(minimum=1, **usual)
    assert ratio(agreement[:3], drift[:3], 2) == 0.5
    assert freeze_after(agreement, drift, flat, rule) == 5  # quiet in rounds 4 and 5
    assert freeze_after(agreement[:4], drift[:4], flat[:4], rule) is None
    assert freeze_after(agreement, drift, flat, Rule(minimum=7, **usual)) == 7
    assert freeze_after(agreement, drift, flat, Rule(minimum=1, cap=3, **usual)) == 3
    assert freeze_after([1.0] * 8, drift, flat, rule) is None
    # No drift: never, cap or not.
    assert freeze_after([0.0] * 8, [0.0] * 8, flat, Rule(minimum=1, cap=3, **usual)) is None


def test_nothing_freezes_while_the_loss_falls():
    """The kernel rests from the start; the loss falls until round 6 and stands still then."""
    losses = [2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0]
    rule = Rule(minimum=1, threshold=0.1, window=1, patience=1, progress=0.05, span=2)
    # Rounds 7 and 8 against 5 and 6: 2.0 is less than 0.95 of 2.2; rounds 8 and 9 against 6 and 7: not.
    assert [still_learns(losses[:n], rule) for n in range(1, 11)] == [True] * 8 + [False] * 2
    assert freeze_after([0.0] * 10, [1.0] * 10, losses, rule) == 9
    assert freeze_after([0.0] * 10, [1.0] * 10, [2.0 - 0.15 * n for n in range(10)], rule) is None
    # Private clients tell no loss: then nobody knows, and nothing is frozen.
    assert freeze_after([0.0] * 10, [1.0] * 10, [None] * 10, rule) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), max_size=30),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_a_decision_stands_whatever_comes_later(stream, window, patience):
    agreement, drift = [a for a, _ in stream], [d for _, d in stream]
    losses = [1 + a for a in agreement]
    rule = Rule(minimum=2, window=window, patience=patience, span=2)
    whole = freeze_after(agreement, drift, losses, rule)
    parts = ((agreement[:n], drift[:n], losses[:n]) for n in range(len(stream) + 1))
    first = next((n for n, part in enumerate(parts) if freeze_after(*part, rule) is not None), None)
    assert whole == first


# Settings and runs ----------------------------------------------------------------------------------------


def test_settings():
    own = Settings(warmup_rounds="auto").checked(40)
    assert (own.warmup_rounds, own.rule) == ("auto", Rule(minimum=30, span=4))
    assert Settings(warmup_rounds="auto").checked(10).rule.span == 3
    for bad in ({"warmup_rounds": "soon"}, {"warmup_minimum": 41}, {"warmup_cap": -1}, {"warmup_window": 0}):
        with pytest.raises(UserError):
            Settings(**bad).checked(40)


def test_a_resumed_run_keeps_what_decided_its_freeze_and_may_have_fewer_rounds():
    given = vars(Settings(warmup_rounds=2).checked(60))
    assert given["warmup_minimum"] == 45
    kept = Settings.kept_by(given, {"stage": "frozen"})
    assert Settings(**kept).checked(32).warmup_rounds == 2
    assert Settings.kept_by(given, {"stage": "warmup"}) == {}
    ruled = vars(Settings(warmup_rounds="auto").checked(40))
    assert Settings.kept_by(ruled, {"stage": "frozen"}) == ruled


def auto_strategy(local_steps=None):
    roles = {"query": Role("query", 0), "head": Role("head", None)}
    federation = Federation(connect(None, roles), client=ClientConfig(local_steps=local_steps))
    settings = Settings(warmup_rounds="auto", warmup_span=1, warmup_patience=1, warmup_minimum=1)
    return FedFrozen(federation, settings.checked(6))


def seen(number, **more):
    figures = {"agreement": 0.0, "drift": 1.0, "signal": 0.0, "ratio": 0.0}
    return {"round": number, "stage": "warmup", "train_loss": 1.0, "warmup": figures} | more


def test_clients_of_one_step_drift_from_nothing():
    """At rest from the start: frozen after the second loss, unless every client takes one step a round."""
    for steps, stage in ((None, "frozen"), (5, "frozen"), (1, "warmup")):
        strategy = auto_strategy(steps)
        for number in (1, 2):
            strategy.recall(seen(number))
        assert strategy.stage(3) == stage, steps


def test_what_an_older_rule_has_frozen_stays_frozen():
    strategy = auto_strategy()
    strategy.recall(seen(1))
    strategy.recall({"round": 2, "stage": "frozen", "train_loss": 1.0})
    strategy.recall({"round": 3, "stage": "frozen", "train_loss": 0.1})
    assert [strategy.stage(number) for number in (1, 2, 3, 4)] == ["warmup", "frozen", "frozen", "frozen"]


AUTO = ["strategy.warmup_rounds=auto", "num_rounds=6", "strategy.warmup_window=2", "checkpoint.keep=6"]
AUTO += ["strategy.warmup_span=1", "strategy.warmup_progress=1"]  # whatever the loss does
EARLY = [*AUTO, "strategy.warmup_threshold=10", "strategy.warmup_minimum=3", "strategy.warmup_patience=2"]


@pytest.mark.slow
def test_auto_is_fedavg_until_it_freezes(train):
    plain = train("strategy=fedavg", "num_rounds=6", folder="plain")
    never = train(*AUTO, "strategy.warmup_threshold=-100", folder="never")
    assert same_bits(plain.model, never.model)
    frozen = train(*EARLY, "checkpoint.keep=6", folder="frozen")
    assert [row["stage"] for row in frozen.rows[1:]] == ["warmup"] * 3 + ["frozen"] * 3
    assert same_bits(plain_after := never.model_after(3), frozen.model_after(3)) and plain_after
    assert [row["warmup"] for row in frozen.rows[1:4]] == [row["warmup"] for row in never.rows[1:4]]
    assert set(frozen.rows[3]["warmup"]) == {"agreement", "drift", "signal", "ratio"}
    kernel = [name for name in frozen.model if "query" in name or "key" in name or "q_proj" in name]
    assert kernel and all(torch.equal(frozen.model[n], frozen.model_after(3)[n]) for n in kernel)


@pytest.mark.slow
def test_partial_participation(train):
    run = train(*AUTO, "num_clients=4", "participation=0.5")
    assert all("warmup" in row for row in run.rows[1:] if row["stage"] == "warmup")
    assert all(1 < row["effective_clients"] <= 2 for row in run.rows[1:])


@pytest.mark.parametrize(
    "stop", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_resumed_and_forked_runs_decide_as_the_unbroken_one(train, tmp_path, stop):
    words = [
        *AUTO,
        "strategy.warmup_threshold=0.4",
        "strategy.warmup_minimum=3",
        "strategy.warmup_patience=1",
    ]
    words += ["client.lr_schedule=constant"]
    whole = train(*words, folder="whole")
    fork = train(*words, f"from={whole.folder}/checkpoints/{stop}", folder="fork")
    assert same_bits(whole.model, fork.model)

    def told(run):
        return [(row["stage"], row.get("warmup")) for row in run.rows]

    assert told(fork) == told(whole)
    # Cut the fork's own run and resume it: it goes on from its own rows.
    for later in range(stop + 2, 7):
        target = tmp_path / "fork" / "checkpoints" / str(later)
        for file in target.iterdir():
            file.unlink()
        target.rmdir()
    assert command(["resume", str(fork.folder)]) == 0
    again = Run(fork.folder)
    assert same_bits(whole.model, again.model) and told(again) == told(whole)


def test_a_bad_word_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command([*SMALL, "strategy.warmup_rounds=soon"]) == 2
    assert (
        "strategy.warmup_rounds=soon is unknown: give a number of rounds, or auto." in capsys.readouterr().err
    )
