"""What was spent is what an independent accountant says, and the noise solved for keeps the budget."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant as OpacusRdp

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.privacy.accountant import (
    PrvAccountant,
    Truncated,
    curve_of,
    epsilon_bounds,
    epsilon_of,
    loss_below,
    merged,
    rough_epsilon,
    solve_noise,
)
from fedfrozen_app.privacy.opacus_parts import (
    PoissonSubsampledGaussianPRV,
    PRVAccountant,
    TruncatedPrivacyRandomVariable,
)
from fedfrozen_app.privacy.steps import Steps

DELTA = 1e-5


def independent(steps, accountant):
    """Google's dp-accounting, told every step in the order in which it was taken."""
    for noise, rate, count in steps:
        event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
        accountant.compose(SelfComposedDpEvent(event, count))
    return accountant.get_epsilon(DELTA)


def twenty_rounds(noise, selection_noise, every=3):
    """A choice of layers every few rounds, then training steps; the client skips rounds 7 and 12."""
    for number in range(20):
        if number in (7, 12):
            continue
        if number % every == 0:
            yield Steps(selection_noise, 0.25, 1)
        yield Steps(noise, 0.08, 12)


CASES = [pytest.param(0.8, 10.0, marks=pytest.mark.slow), (3.0, 60.0)]


@pytest.mark.parametrize(("noise", "selection"), CASES)
def test_renyi_agrees_with_dp_accounting(noise, selection):
    steps = list(twenty_rounds(noise, selection))
    # The same orders, or the two would optimise over different curves.
    alphas = OpacusRdp.DEFAULT_ALPHAS
    ours = epsilon_of(steps, DELTA, "rdp", 8.0)
    assert ours == pytest.approx(independent(steps, RdpAccountant(alphas)), rel=0.01)


@pytest.mark.parametrize(("noise", "selection"), CASES)
@pytest.mark.slow
def test_prv_agrees_with_privacy_loss_distributions(noise, selection):
    steps = list(twenty_rounds(noise, selection))
    expected = independent(steps, PLDAccountant(value_discretization_interval=1e-3))
    ours = epsilon_of(steps, DELTA, "prv", expected)
    assert ours == pytest.approx(expected, rel=0.01)
    assert ours > expected * 0.999  # an upper bound


RUNS = [Steps(1.1, 0.05, 120), Steps(0.9, 0.02, 300), Steps(2.5, 0.25, 60)]  # in turn, of the same data


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.slow
def test_many_runs_together_cost_what_dp_accounting_says(count):
    """All steps of all runs as one composition; who adds epsilons up, as a site does, counts more."""
    runs = [RUNS[number % len(RUNS)] for number in range(count)]
    expected = independent(runs, PLDAccountant(value_discretization_interval=1e-3))
    together = epsilon_of(runs, DELTA, "prv", expected)
    assert together == pytest.approx(expected, rel=0.01) and together > expected * 0.999
    renyi = epsilon_of(runs, DELTA, "rdp", expected)
    assert renyi == pytest.approx(independent(runs, RdpAccountant(OpacusRdp.DEFAULT_ALPHAS)), rel=0.01)
    assert renyi >= expected
    low, high = epsilon_bounds(runs, DELTA)
    assert low <= expected * 1.001 and expected * 0.999 <= high and high - low < 0.03 * expected
    added_up = sum(epsilon_of([run], DELTA, "prv", expected) for run in runs)
    assert added_up >= together * 0.999  # and that at δ times the number of runs


def test_the_choice_of_layers_costs_something():
    steps = list(twenty_rounds(1.5, 3.0))
    without = [step for step in steps if step.rate != 0.25]
    assert epsilon_of(steps, DELTA, "rdp", 8.0) > 1.02 * epsilon_of(without, DELTA, "rdp", 8.0)


def test_no_noise_is_no_privacy_and_no_steps_cost_nothing():
    assert epsilon_of([], DELTA, "prv", 1.0) == 0
    assert epsilon_of([Steps(0.0, 0.1, 1), Steps(1.0, 0.1, 1)], DELTA, "prv", 1.0) == math.inf


def test_equal_steps_are_counted_together_in_any_order():
    steps = [Steps(1.0, 0.1, 2), Steps(2.0, 0.1, 1), Steps(1.0, 0.1, 3)]
    assert merged(steps) == (Steps(1.0, 0.1, 5), Steps(2.0, 0.1, 1))


@pytest.mark.parametrize(("kind", "epsilon"), [("rdp", 8.0), ("prv", 8.0), ("prv", 0.5)])
@pytest.mark.slow
def test_the_noise_solved_for_spends_the_budget_and_no_more(kind, epsilon):
    other_steps = (Steps(40.0 / epsilon, 0.25, 4),)
    noise = solve_noise(0.1, 100, epsilon=epsilon, delta=DELTA, kind=kind, other_steps=other_steps)
    spent = epsilon_of([Steps(noise, 0.1, 100), *other_steps], DELTA, kind, epsilon)
    assert 0.995 * epsilon < spent <= epsilon
    assert epsilon_of([Steps(noise, 0.1, 101), *other_steps], DELTA, kind, epsilon) > epsilon


def test_a_full_sample_is_accounted_too():
    noise = solve_noise(1.0, 10, epsilon=2.0, delta=DELTA, kind="prv")
    assert epsilon_of([Steps(noise, 1.0, 10)], DELTA, "prv", 2.0) == pytest.approx(
        independent([Steps(noise, 1.0, 10)], PLDAccountant()), rel=0.01
    )


@pytest.mark.slow
def test_a_budget_below_an_accountant_s_reach_is_one_sentence():
    with pytest.raises(UserError, match=r"rdp accountant cannot.*epsilon 0\.05"):
        solve_noise(0.25, 4, epsilon=0.05, delta=DELTA, kind="rdp")
    with pytest.raises(UserError, match=r"prv accountant cannot.*epsilon 0\.001"):
        solve_noise(0.25, 4, epsilon=0.001, delta=DELTA, kind="prv")


def test_an_impossible_budget_is_one_sentence():
    other_steps = (Steps(0.5, 1.0, 10),)
    with pytest.raises(UserError, match="No noise keeps the training steps within"):
        solve_noise(0.5, 10, epsilon=0.5, delta=DELTA, kind="rdp", other_steps=other_steps)


@pytest.mark.parametrize(
    ("noise", "rate", "times"),
    [(1.0, 0.4, 60), (3.0, 1.0, 20), (0.06, 0.2, 3), (1.1, 1e-6, 10), (0.3, 0.999, 5)],
)
def test_a_quicker_mean_is_opacus_own(noise, rate, times):
    accountant = PrvAccountant()
    accountant.history = [(noise, rate, times)]
    with np.errstate(all="ignore"):  # far out, and at rate 1
        domain = accountant._get_domain([], [times], 0.04, 1e-8)
        slow = TruncatedPrivacyRandomVariable(
            PoissonSubsampledGaussianPRV(rate, noise), domain.t_min, domain.t_max
        )
        assert Truncated(noise, rate, domain).mean() == pytest.approx(slow.mean(), rel=1e-11, abs=1e-15)
        epsilon = accountant.get_epsilon(delta=1e-5, eps_error=0.04)
        accountant._get_dprv = PRVAccountant._get_dprv.__get__(accountant)
        assert epsilon == pytest.approx(accountant.get_epsilon(delta=1e-5, eps_error=0.04), rel=1e-10)


def test_a_loss_far_out_is_certain():
    chance = loss_below(0.3, 0.2)
    assert chance(-1.0) == 0.0 and chance(699.0) == chance(800.0) == 1.0


@pytest.mark.slow
def test_a_rate_of_one_in_a_million_is_accounted():
    """With so few rows in a sample δ alone may cover the loss. Before, Opacus' "Cannot compute epsilon" for
    the little noise at which the search begins."""
    noise = solve_noise(1e-6, 30, epsilon=3.0, delta=1e-3, kind="prv")
    assert 0.05 < noise < 1 and 0 <= epsilon_of([Steps(noise, 1e-6, 30)], 1e-3, "prv", 3.0) <= 3.0


def test_where_opacus_computes_no_epsilon_its_renyi_bound_counts():
    steps = (Steps(0.1, 1e-6, 30),)
    bound = rough_epsilon(steps, 1e-3)
    assert bound > 1000 and epsilon_of(steps, 1e-3, "prv", 1000.0) == bound
    assert epsilon_bounds(steps, 1e-3) == (0.0, bound)
    assert curve_of(steps, 1e-3, points=5).epsilons[-1] == bound
