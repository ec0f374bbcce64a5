"""What guesses prove: by hand, against known distributions, and never more than is true."""

import math

import numpy as np
import pytest
from scipy.stats import beta, binom, norm

from fedfrozen_app.audit.bound import (
    DOUBT,
    epsilon_lower,
    evaluate_canaries,
    impossible,
    likelihoods,
    p_value,
)
from fedfrozen_app.privacy.accountant import Curve, curve_of, epsilon_bounds, solve_noise
from fedfrozen_app.privacy.steps import Steps

DELTA = 1e-5


def pure(epsilon):
    """The curve of (ε, 0)-privacy."""
    return Curve(np.array([epsilon]), np.array([0.0]))


def test_one_canary_by_hand():
    """One guess is right with chance e²/(1 + e²) = 0.8808 at most."""
    assert impossible(1, 1, 1, 0.89, pure(2.0)) and not impossible(1, 1, 1, 0.87, pure(2.0))


@pytest.mark.parametrize("canaries", [20, 300])
def test_randomised_response_is_never_refuted(canaries):
    """It is exactly (ε, 0)-private, and right as often as such a thing can be: a binomial."""
    chance = math.e / (1 + math.e)
    for right in range(canaries + 1):
        if binom.sf(right - 1, canaries, chance) >= DOUBT:
            assert not impossible(canaries, canaries, right, DOUBT, pure(1.0))
    assert impossible(canaries, canaries, canaries, DOUBT, pure(1.0))
    assert not impossible(canaries, canaries, canaries, DOUBT, pure(9.0))


def test_fewer_guesses_of_many_canaries_are_no_less_sound():
    """Of 300 canaries 60 are guessed, at random which, by randomised response: again a binomial."""
    for right in range(61):
        if binom.sf(right - 1, 60, 0.75) >= DOUBT:
            assert not impossible(300, 60, right, DOUBT, pure(math.log(3)))


@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_the_curve_of_one_full_step_is_the_gaussian_s(noise):
    """F(x) = Φ(Φ⁻¹(x) + 1/σ). Ours may promise less, never more."""
    curve = curve_of((Steps(noise, 1.0, 1),), DELTA)
    for chance in (1e-3, 0.05, 0.5, 0.9, 0.99):
        exact = norm.cdf(norm.ppf(chance) - 1 / noise)
        assert 0.9 * exact - 1e-4 <= curve.least_chance(chance) <= exact


def test_the_bounds_of_epsilon_hold_the_gaussian_s():
    # δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), for σ = 2
    low, high = epsilon_bounds([Steps(2.0, 1.0, 1)], DELTA)

    def delta(epsilon):
        return norm.cdf(0.25 - 2 * epsilon) - math.exp(epsilon) * norm.cdf(-0.25 - 2 * epsilon)

    assert delta(high) <= DELTA <= delta(low) and high - low < 0.05


def test_the_bound_without_a_curve_is_clopper_and_pearson_s():
    for right in (60, 80, 100):
        lower = beta.ppf(DOUBT, right, 100 - right + 1)
        expected = max(0.0, np.log(lower / (1 - lower)))
        assert epsilon_lower(200, 100, right, 0.0) == pytest.approx(expected, abs=1e-6)
    assert epsilon_lower(200, 100, 50, 0.0) == 0.0


def test_delta_can_only_weaken_it():
    assert p_value(200, 100, 90, 1.0, 1e-3) > p_value(200, 100, 90, 1.0, 0.0)
    assert epsilon_lower(200, 100, 90, 1e-3) < epsilon_lower(200, 100, 90, 0.0)


def test_likelihoods_by_hand():
    """At rate 1 the noise's scale cancels from the ranking: Σ (2x − 1)/2σ², and σ is |x|'s median /
    0.6745."""
    seen = np.array([[0.6745, -0.6745, 2.0, 0.5]])
    assert likelihoods(seen, 1.0) == pytest.approx((2 * seen[0] - 1) / 2)
    assert likelihoods(np.zeros((0, 3)), 0.5).tolist() == [0, 0, 0]
    absent = likelihoods(np.array([[np.nan, 0.5, 1.0]]), 0.5)  # a canary that did not train tells nothing
    assert absent[0] == 0


def play(generator, noise, rate, steps, canaries, scale=1.0, length=1.0):
    coins = generator.random(canaries) < 0.5
    there = (generator.random((steps, canaries)) < rate) & coins
    return there * length + generator.normal(size=there.shape) * noise * scale, coins


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.slow
def test_what_was_broken_is_refuted_and_what_was_not_is_not(epsilon):
    generator = np.random.default_rng(0)
    noise = solve_noise(0.3, 20, epsilon=epsilon, delta=DELTA, kind="prv")
    paid_for = (Steps(noise, 0.3, 20),)
    honest = evaluate_canaries(*play(generator, noise, 0.3, 20, 1000), paid_for, DELTA)
    assert not honest.refuted and honest.could_refute
    assert honest.epsilon_lower < epsilon < honest.epsilon_most
    assert honest.epsilon_lower_any <= honest.epsilon_lower + 0.1
    for broken in ({"scale": 1e-9}, {"length": 10.0}):
        found = evaluate_canaries(*play(generator, noise, 0.3, 20, 1000, **broken), paid_for, DELTA)
        assert found.refuted and found.epsilon_lower > 0.99 * epsilon


@pytest.mark.slow
def test_so_few_canaries_could_not_tell():
    noise = solve_noise(0.3, 20, epsilon=8.0, delta=DELTA, kind="prv")
    coins = np.arange(20) % 2 == 0
    certain = np.where(coins, 1.0, 0.0)[None, :].repeat(20, axis=0)
    found = evaluate_canaries(certain, coins, (Steps(noise, 0.3, 20),), DELTA)
    assert found.right == found.guesses == 20 and not found.refuted and not found.could_refute
    assert found.epsilon_lower == found.epsilon_most < 8
    none = evaluate_canaries(np.zeros((20, 0)), np.zeros(0, dtype=bool), (Steps(noise, 0.3, 20),), DELTA)
    assert none.epsilon_most == 0 and not none.could_refute
