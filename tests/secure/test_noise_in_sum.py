"""Noise in shares: whole numbers whose sum is what was promised, and an epsilon that others compute too."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.local.private_units import sampling
from fedfrozen_app.privacy.accountant import epsilon_of, solve_noise
from fedfrozen_app.privacy.discrete import discrete_gaussian
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.secure.layout import Arithmetic, SumLayout, encode
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.secure.vector import Vector, signed
from fedfrozen_app.secure.work import NOISE, SENSITIVITY, add_noise

ON = ("secure_aggregation=on", "secure_aggregation.noise=sum", "privacy=dp_sgd")
SGD = ("client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.5", "client.lr_schedule=constant")


@pytest.mark.parametrize("std", [0.7, 250.0])
def test_each_whole_number_has_its_chance(std):
    """Against the formula, by chi-square; and the variance, which for σ ≥ 1 is σ² to ten digits."""
    found = discrete_gaussian(60_000, std, Keystream().words)
    reach = math.ceil(4 * std)
    edges = np.unique(np.linspace(-reach, reach, 25).astype(int))
    x = np.arange(-math.ceil(12 * std), math.ceil(12 * std) + 1)
    mass = np.exp(-0.5 * (x / std) ** 2)
    mass /= mass.sum()
    expected = np.histogram(x, edges, weights=mass)[0]
    seen = np.histogram(found, edges)[0]
    kept = expected * 60_000 > 5
    seen, expected = seen[kept], expected[kept]
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4
    assert (
        found.var() == pytest.approx((mass * x**2).sum(), rel=0.03) and abs(found.mean()) < 0.02 * std + 0.02
    )


def test_the_shares_of_those_who_are_needed_are_the_whole_noise():
    """σ · (lr · C · scale + √d), by hand, from the sum of as many shares as must survive."""
    rules, needed, size = Arithmetic(32, 1.0, 1.0, 100, cohort=6, margin=0.25), 4, 20_000
    owed = {NOISE: 3.0, SENSITIVITY: 0.5}
    whole = 3.0 * (0.5 * (((2**31 - 1) * 0.75 - 6) / (6 * 100 * 1.0)) + math.sqrt(size))
    total = Vector.zeros(4, size)
    for _ in range(needed):
        vector = Vector.zeros(4, size)
        add_noise(vector, rules, needed, owed, Keystream().words)
        total.add(vector)
    noise = signed(total, 32)[1].astype(float)
    assert noise.std() == pytest.approx(whole, rel=0.03)
    assert stats.kstest(noise / whole, "norm").pvalue > 1e-4


def test_noise_that_cannot_be_given_is_no_noise_at_all():
    vector = Vector.zeros(4, 10)
    good = Arithmetic(32, 1.0, 1.0, 100, cohort=3, margin=0.25)
    with pytest.raises(ProtocolError, match="without what its noise is to be"):
        add_noise(vector, good, 2, {}, Keystream().words)
    with pytest.raises(ProtocolError, match="too coarse"):
        add_noise(vector, good, 2, {NOISE: 1.0, SENSITIVITY: 1e-9}, Keystream().words)
    with pytest.raises(ProtocolError, match="would not fit"):
        add_noise(vector, good, 2, {NOISE: 100.0, SENSITIVITY: 50.0}, Keystream().words)
    assert not vector.body.any()


def test_epsilon_is_what_another_library_makes_of_the_same_rounds():
    """Rényi's bound of the discrete Gaussian is the continuous one's: dp-accounting's for 30 full sums."""
    delta, rounds = 1e-5, 30
    noise = solve_noise(1.0, rounds, epsilon=8.0, delta=delta, kind="rdp")
    ours = epsilon_of([Steps(noise, 1.0, rounds)], delta, "rdp", 8.0)
    other = RdpAccountant()
    other.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    assert 7.9 < ours <= 8.0 and ours == pytest.approx(other.get_epsilon(delta), rel=0.02)


def test_one_unit_moves_the_rounded_sum_by_less_than_is_said():
    """Neighbours: a client's numbers with and without one unit, rounded with the same draws."""
    rules, layout = Arithmetic(32, 0.05, 1.0, 50, cohort=3), SumLayout({"w": torch.Size([3000])}, bare=True)
    rng = np.random.default_rng(0)
    most = 0.5 * rules.scale("", ()) + math.sqrt(3000)
    for seed in range(20):
        update = torch.from_numpy(rng.normal(0, 0.01, 3000))
        unit = torch.from_numpy(rng.normal(size=3000))
        near = update + unit / unit.norm() * 0.5 / 40  # lr · C = 0.5 of 40 declared units
        one, other = (
            encode(layout, rules, {"w": value}, 40, {}, np.random.default_rng(seed))
            for value in (update, near)
        )
        apart = (one.body - other.body).view(np.int32).astype(float)
        assert np.linalg.norm(apart) <= most


def test_a_private_run_with_noise_in_the_sum(train):
    """Every client tells the same epsilon, at most what was asked for; nothing else is told of anybody."""
    words = (*ON, *SGD, "privacy.epsilon=4", "secure_aggregation.max_examples=200", "num_rounds=2")
    run = train(*words)
    rows = run.rows[1:]
    assert [row["clients_ok"] for row in rows] == [3, 3]
    assert rows[0]["epsilon_max"] < rows[1]["epsilon_max"] <= 4
    assert "train_loss" not in rows[0] and rows[0]["secure"]["clipped"] == 0
    folder = run.folder / "privacy"
    assert folder.stat().st_mode & 0o077 == 0  # losses are in it
    assert {path.suffix for path in folder.iterdir()} == {".json", ".jsonl", ".lock"}  # and no update
    again = train(*words, folder="again")
    assert any(
        (run.model[name] != again.model[name]).any() for name in run.model
    )  # from the system's entropy
    seeded = [
        train(*words, "privacy.seeded_noise=true", "num_rounds=1", folder=name) for name in ("one", "other")
    ]
    assert all(torch.equal(seeded[0].model[name], seeded[1].model[name]) for name in seeded[0].model)


@pytest.mark.slow
def test_the_sum_has_less_noise_than_the_sites(train):
    """The same epsilon and number of steps: how far noise alone moves the model, in either way."""
    common = (*SGD, "privacy.epsilon=2", "num_rounds=1", "num_clients=6", "client.batch_size=1000")
    moved = {}
    start = train("num_clients=6", "num_rounds=0", folder="start").model
    for where in ("site", "sum"):
        words = ("secure_aggregation=on", f"secure_aggregation.noise={where}", "privacy=dp_sgd")
        more = ("secure_aggregation.max_examples=200", "secure_aggregation.clip=10")
        run = train(*words, *more, *common, folder=where)
        moved[where] = math.sqrt(sum(float((run.model[n] - start[n]).square().sum()) for n in start))
    assert moved["sum"] < 0.75 * moved["site"]  # √6 less noise, less what the threshold and Rényi cost


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (ON[:2], "is the noise of privacy=dp_sgd"),
        ((*ON, "client.lr=0.1"), "client.optimizer=adamw would make something else"),
        ((*ON, *SGD, "client.momentum=0.9"), "client.momentum=0.9 would make something else"),
    ],
)
def test_what_noise_in_the_sum_does_not_cover_is_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        read(resolved(compose_config(list(words))))


def test_a_round_is_one_step_over_all_rows():
    assert sampling(read(resolved(compose_config([*ON, *SGD]))), 321) == (1.0, 1)
