"""The ring's bound by a count of clients that stay within it: by hand, inside the sum, and under privacy."""

import math

import numpy as np
import pytest
import torch

from fedfrozen_app.config import SecureAggregationConfig, compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.local.owed_noise import owed_noise
from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.steps import COUNT_NOISE, NOISE, SENSITIVITY, Steps
from fedfrozen_app.privacy.sum_noise import SumNoise
from fedfrozen_app.run.outline import planning_strategy
from fedfrozen_app.secure.layout import FIXED, FRACTION, WITHIN, Arithmetic, SumLayout, Sums, decode, encode
from fedfrozen_app.secure.vector import Vector
from fedfrozen_app.secure.work import add_noise, settings_of
from fedfrozen_app.server.masked_training import renewed_clip
from fedfrozen_app.server.state import restore
from tests.resuming import killed_before_checkpoint

ON = ("secure_aggregation=on", "secure_aggregation.max_examples=100")
SGD = ("client.optimizer=sgd", "client.weight_decay=0", "client.lr_schedule=constant")
QUANTILE = "secure_aggregation.quantile=0.5"
RULES = Arithmetic(16, 0.1, 1.0, 1, cohort=4)


def sums_of(within, replies=4):
    return Sums(replies, 60, 1200, 0, {}, {}, {}, {}, within)


def layout_with(shape=(3000,), **more):
    return SumLayout({"w": torch.Size(shape)}, counted=True, **more)


def test_the_rule_by_hand():
    """C ← C · exp(−0.2 (b − γ)), and never above what sites agreed to."""
    secure = SecureAggregationConfig(name="on", clip=1.0, quantile=0.5)
    assert renewed_clip(secure, sums_of(4.0), 1.0) == pytest.approx(math.exp(-0.1))
    assert renewed_clip(secure, sums_of(2.0), 0.3) == 0.3
    assert renewed_clip(secure, sums_of(0.0), 0.3) == pytest.approx(0.3 * math.exp(0.1))
    assert renewed_clip(secure, sums_of(0.0), 1.0) == 1.0
    assert renewed_clip(secure, None, 0.3) == 0.3
    # Noise may take a count beyond all clients, or below none.
    assert renewed_clip(secure, sums_of(9.5), 0.3) == renewed_clip(secure, sums_of(4.0), 0.3)
    assert renewed_clip(secure, sums_of(-3.0), 0.3) == renewed_clip(secure, sums_of(0.0), 0.3)


@pytest.mark.parametrize("bare", [False, True])
def test_the_sum_counts_who_stays_within(bare):
    """Of four clients one has no value beyond the bound, one three of 3,000, one four, and one all."""
    layout, total = layout_with(bare=bare), None
    for over in (0, 3, 4, 3000):
        update = torch.full((3000,), 0.05)
        update[:over] = 0.2
        vector = encode(layout, RULES, {"w": update}, 1, {}, np.random.default_rng(over))
        total = vector if total is None else total
        if total is not vector:
            total.add(vector)
    found = decode(layout, RULES, total)
    assert found.within == 2.0 and found.replies == 4
    assert layout.head == FIXED + 1 + (not bare)


def test_the_bound_finds_the_quantile():
    """Thirty clients with largest changes between 0.01 and 0.1: half of them stay within it in the end."""
    secure = SecureAggregationConfig(name="on", clip=1.0, quantile=0.5)
    largest = np.linspace(0.01, 0.1, 30)
    clip = 1.0
    for _ in range(80):
        clip = renewed_clip(secure, sums_of(float((largest <= clip).sum()), 30), clip)
    assert 0.4 <= (largest <= clip).mean() <= 0.6


def test_both_queries_cost_what_one_does():
    """1/σ² = 1/of_sum² + 1/of_count²: Rényi's ε of both together is that of σ, which the run promises."""
    run = SumNoise(4.0, 1e-5, 3, share=0.1)
    assert run.of_sum == pytest.approx(run.multiplier / math.sqrt(0.9))
    assert run.of_sum**-2 + run.of_count**-2 == pytest.approx(run.multiplier**-2)
    both = [Steps(run.of_sum, 1.0, 3), Steps(run.of_count, 1.0, 3)]
    assert epsilon_of(both, 1e-5, "rdp", 4.0) == pytest.approx(4.0, rel=1e-3)
    assert epsilon_of([*both[:1], Steps(run.of_count / 2, 1.0, 3)], 1e-5, "rdp", 4.0) > 4.2
    assert SumNoise(4.0, 1e-5, 3).of_sum == SumNoise(4.0, 1e-5, 3).multiplier


@pytest.mark.parametrize("halved", [False, True])
def test_the_count_has_its_noise(halved):
    """2,000 counts of four shares: a χ² test that fails an honest one once in a million, and half of it."""
    rng, carriers, count_noise = np.random.default_rng(0), 4, 2.5
    owed = {NOISE: 1.0, SENSITIVITY: 0.005, COUNT_NOISE: count_noise / (2 if halved else 1)}
    rules, found = Arithmetic(16, 0.1, 1.0, 1, cohort=4, margin=0.25), []
    for _ in range(2000):
        total = Vector.zeros(FIXED + 1, 1, 16)
        for _ in range(carriers):
            one = Vector.zeros(FIXED + 1, 1, 16)
            add_noise(one, rules, carriers, owed, lambda n: rng.integers(0, 2**64, n, dtype=np.uint64))
            total.add(one)
        found.append(int(total.head.view("<i8")[WITHIN]) / FRACTION)
    squares = float(np.square(found).sum()) / count_noise**2
    assert (abs(squares - 2000) < 4.9 * math.sqrt(2 * 2000)) == (not halved)


def test_who_does_not_count_owes_nothing_for_it():
    vector, owed = Vector.zeros(FIXED, 1, 16), {NOISE: 1.0, SENSITIVITY: 0.005}
    add_noise(vector, Arithmetic(16, 0.1, 1.0, 1, 4, 0.25), 2, owed, lambda n: np.zeros(n, np.uint64))
    assert not vector.head.any()
    plain = settings_of(SecureAggregationConfig(name="on"))
    assert not {"quantile", "quantile_share"} & set(plain)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            (QUANTILE, "secure_aggregation.renew=4", "secure_aggregation.rotate=true"),
            "are two rules for one bound",
        ),
        (("secure_aggregation.quantile=1",), "is out of range"),
        ((QUANTILE, "secure_aggregation.quantile_share=0.1"), "ignores secure_aggregation.quantile_share"),
    ],
)
def test_what_cannot_work_is_refused(words, sentence):
    with pytest.raises(UserError) as error:
        _ = compose_run([*ON, *words]).config
    assert sentence in str(error.value)


def test_the_noise_that_is_owed_follows_from_settings():
    words = (
        "privacy=dp_sgd",
        "privacy.epsilon=4",
        "secure_aggregation.noise=sum",
        *SGD,
        "num_rounds=3",
    )
    plain = compose_run([*ON, *words]).config
    counted = compose_run([*ON, *words, QUANTILE, "secure_aggregation.quantile_share=0.1"]).config
    assert COUNT_NOISE not in owed_noise(plain, 1)
    one, other = owed_noise(plain, 1), owed_noise(counted, 1)
    assert other[NOISE] == pytest.approx(one[NOISE] / math.sqrt(0.9))
    assert other[SENSITIVITY] == one[SENSITIVITY]


@pytest.mark.parametrize("more", [(), (QUANTILE,)])
def test_a_fork_has_the_bound_of_its_own_rule(more):
    """One without a rule does not go on with the last bound of a run that had one."""
    config = compose_run(["strategy=fedavg", *ON, *more]).config
    strategy = planning_strategy(config, {"a": torch.zeros(2)}, {})
    row = {"round": 1, "secure": {"next_clip": 0.3}}
    restore(strategy, Checkpoint(1, {"strategy": {"name": "fedavg"}}, [], {}, row), config)
    assert strategy.federation.sums.clip == (0.3 if more else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("secure_aggregation.bits=8",),
        (
            *("privacy=dp_sgd", "privacy.epsilon=8", "privacy.seeded_noise=true", *SGD),
            *("secure_aggregation.noise=sum", "client.lr=0.1", "secure_aggregation.bits=24"),
        ),
    ],
    ids=" ".join,
)
def test_a_resumed_run_goes_on_with_its_bound(train, monkeypatch, words):
    more = (
        "strategy=fedavg",
        *ON,
        QUANTILE,
        "secure_aggregation.clip=0.5",
        "num_rounds=4",
        "checkpoint.every=1",
    )
    whole = train(*more, *words, folder="whole")
    clips = [row["secure"]["clip"] for row in whole.rows[1:]]
    assert all(row["clients_failed"] == 0 for row in whole.rows[1:])
    for row, clip, after in zip(whole.rows[1:], clips, [*clips[1:], None], strict=True):
        assert row["secure"]["next_clip"] == (after or row["secure"]["next_clip"])
        wanted = min(clip * math.exp(-0.2 * (row["secure"]["within"] - 0.5)), 0.5)
        assert row["secure"]["next_clip"] == pytest.approx(wanted)
    with killed_before_checkpoint(monkeypatch, 3):
        train(*more, *words, folder="broken")
    resumed = train(*more, *words, folder="broken", resume=True)
    assert [row["secure"]["clip"] for row in resumed.rows[1:]] == clips
