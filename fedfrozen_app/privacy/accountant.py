"""How much privacy a list of noisy steps costs, and how much noise a budget needs.

Opacus' accountants do the mathematics. Every step here is a Poisson-subsampled Gaussian mechanism, whether it
releases a gradient or the scores that choose layers, so one list of (noise, rate, count) holds them all.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.privacy.opacus_parts import (
    Domain,
    PoissonSubsampledGaussianPRV,
    PRVAccountant,
    RDPAccountant,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    compute_rdp,
    discretize,
    get_privacy_spent,
)
from fedfrozen_app.privacy.steps import Steps

PRECISION = 200  # the PRV accountant's ε is at most the budget / PRECISION above the true one
WHOLE_ORDERS = [*range(2, 64), 96, 128, 256, 512]
LEAST_NOISE = 0.05
LEAST_EPSILON = 0.01  # below it the PRV accountant's grid takes minutes and too much memory
STRIDE = 0.2  # in log σ, when looking for a bracket


def merged(steps: Iterable[Steps]) -> tuple[Steps, ...]:
    """Equal mechanisms counted together: composition does not depend on their order."""
    counts: dict[tuple[float, float], int] = {}
    for noise, rate, times in steps:
        counts[noise, rate] = counts.get((noise, rate), 0) + times
    return tuple(Steps(noise, rate, times) for (noise, rate), times in counts.items() if times)


def epsilon_of(steps: Iterable[Steps], delta: float, kind: str, budget: float) -> float:
    """ε of all these steps together at δ; `kind` is prv or rdp, `budget` the ε that matters."""
    return _epsilon(merged(steps), delta, kind, budget)


@lru_cache(maxsize=16384)
def _epsilon(steps: tuple[Steps, ...], delta: float, kind: str, budget: float) -> float:
    if not steps:
        return 0.0
    if any(step.noise <= 0 for step in steps):
        return math.inf
    accountant = PrvAccountant() if kind == "prv" else RDPAccountant()
    accountant.history = [tuple(step) for step in steps]
    exact = {"eps_error": budget / PRECISION} if kind == "prv" else {}
    with np.errstate(divide="ignore"):  # at rate 1 it takes the logarithm of 0, and means minus infinity
        try:
            return float(accountant.get_epsilon(delta=delta, **exact))
        except RuntimeError:  # at rates near 1e-6 and with little noise Opacus' sums overflow
            return rough_epsilon(steps, delta)


def epsilon_bounds(steps: Iterable[Steps], delta: float) -> tuple[float, float]:
    """Between these two lies the true ε of all these steps together."""
    steps = merged(steps)
    loss, error = _privacy_loss(steps, delta)
    try:
        low, _, high = loss.compute_epsilon(delta, delta / 1000, error)
    except RuntimeError:  # as above
        return 0.0, rough_epsilon(steps, delta)
    return float(low), float(high)


@dataclass(frozen=True)
class Curve:
    """The privacy curve of steps, at every δ at once: at `epsilons[i]` δ is at most `deltas[i]`.

    So an event with probability x without an example has at most F(x) with it, and vice versa:
    F(x) = min over i of δ + e^ε·x and 1 − e^−ε·(1 − δ − x).
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    def least_chance(self, with_it: float) -> float:
        """The least x for which F(x) is as much as this."""
        steep = (with_it - self.deltas) * np.exp(-self.epsilons)
        flat = 1 - self.deltas - np.exp(self.epsilons) * (1 - with_it)
        return max(0.0, float(steep.max()), float(flat.max()))


@lru_cache(maxsize=256)
def curve_of(steps: tuple[Steps, ...], delta: float, points: int = 200) -> Curve:
    """The curve of all these steps together, by numerical composition, whose errors are added. `delta`: the
    smallest that matters."""
    loss, error = _privacy_loss(merged(steps), delta)
    values, chances = loss.domain.ts, loss.pmf
    epsilons = np.linspace(0.0, epsilon_bounds(steps, delta)[1], points)
    deltas = []
    for epsilon in epsilons - error:
        more, less = values > epsilon, values < -epsilon  # log P/Q under P, an example there or away
        gone = (chances[more] * -np.expm1(epsilon - values[more])).sum()
        there = (chances[less] * (np.exp(-values[less]) - np.exp(epsilon))).sum()
        deltas.append(min(1.0, max(gone, there) + delta / 1000))
    return Curve(epsilons, np.array(deltas))


@lru_cache(maxsize=256)
def _privacy_loss(steps: tuple[Steps, ...], delta: float) -> tuple[Any, float]:
    """Returns the distribution of the privacy loss, and the largest error of an ε computed from it."""
    accountant = PrvAccountant()
    accountant.history = [tuple(step) for step in steps]
    error = max(rough_epsilon(steps, delta), LEAST_EPSILON) / PRECISION
    with np.errstate(divide="ignore"):  # at rate 1 it takes the logarithm of 0, and means minus infinity
        return accountant._get_dprv(eps_error=error, delta_error=delta / 1000), error


def rough_epsilon(steps: Iterable[Steps], delta: float) -> float:
    """A quick upper bound."""
    return _renyi_epsilon(sum(_renyi(noise, rate) * times for noise, rate, times in steps), delta)


def _renyi_epsilon(curve: Any, delta: float) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order")  # another order would be tighter
        return float(get_privacy_spent(orders=WHOLE_ORDERS, rdp=curve, delta=delta)[0])


def loss_below(noise: float, rate: float) -> Callable[[float], float]:
    """The probability that one step's privacy loss is at most t: Opacus' formula, for a scalar."""
    edge = math.log1p(-rate) if rate < 1 else -math.inf
    width = 2 * math.sqrt(2) * noise

    def chance(t: float) -> float:
        if t <= edge:
            return 0.0
        inside = (math.exp(min(t, 700.0)) + rate - 1) / rate
        if inside <= 0:  # the edge, rounded
            return 0.0
        middle = 2 * (math.log(inside) + max(t - 700.0, 0.0)) * noise**2
        present, away = math.erfc((middle - 1) / width), math.erfc((middle + 1) / width)
        return -rate * present / 2 - (1 - rate) * away / 2 + 1.0

    return chance


class Truncated(TruncatedPrivacyRandomVariable):
    """Opacus' class with a scalar mean: a numerical integral calls it a thousand times with one number each,
    for which NumPy arrays would take ten times as long."""

    def __init__(self, noise: float, rate: float, domain: Domain) -> None:
        super().__init__(PoissonSubsampledGaussianPRV(rate, noise), domain.t_min, domain.t_max)
        self._chance = loss_below(noise, rate)

    def mean(self) -> float:
        below, all_of_it = self._chance(self.t_min), float(self._remaining_mass)
        least, most, chance = self.t_min, self.t_max, self._chance

        def one(t: float) -> float:
            return 0.0 if t < least else (chance(t) - below) / all_of_it if t < most else 1.0

        self.cdf = one
        try:
            return float(super().mean())
        finally:
            del self.cdf  # restores the class's method for arrays


class PrvAccountant(PRVAccountant):
    """Opacus' accountant, with the width of its grid from whole Rényi orders alone.

    Any order bounds the width. Whole ones are short sums; the series of the others converges slowly at large
    rates, and would take nearly all of the time.
    """

    def _get_dprv(self, eps_error: float, delta_error: float) -> Any:
        times = [count for _, _, count in self.history]
        domain = self._get_domain([], times, eps_error, delta_error)
        single = [discretize(Truncated(noise, rate, domain), domain) for noise, rate, _ in self.history]
        return compose_heterogeneous(dprvs=single, num_self_compositions=times)

    def _get_domain(
        self, prvs: Any, num_self_compositions: list[int], eps_error: float, delta_error: float
    ) -> Domain:
        total = sum(num_self_compositions)
        single = [_renyi(noise, rate) for noise, rate, _ in self.history]
        whole = sum(curve * times for curve, (_, _, times) in zip(single, self.history, strict=True))
        parts = [(whole, delta_error / 4), *((one, delta_error / (8 * total)) for one in single)]
        bounds = [_renyi_epsilon(curve, tail) for curve, tail in parts]
        width = max(eps_error, *bounds)
        mesh = eps_error / math.sqrt(total * math.log(12 / delta_error) / 2)
        return Domain.create_aligned(-width - 3, width + 3, mesh)


@lru_cache(maxsize=4096)
def _renyi(noise: float, rate: float) -> np.ndarray:
    """(orders,) of one step; cached, because a client's rounds differ only in their number of steps."""
    return np.array(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=WHOLE_ORDERS))


@lru_cache(maxsize=4096)
def solve_noise(
    rate: float, times: int, *, epsilon: float, delta: float, kind: str, other_steps: tuple[Steps, ...] = ()
) -> float:
    """The least noise multiplier with which `times` steps, together with `other_steps`, stay within ε."""

    def excess(log_noise: float) -> float:
        steps = (Steps(math.exp(log_noise), rate, times), *other_steps)
        return math.log(epsilon_of(steps, delta, kind, epsilon) / epsilon)

    if other_steps and epsilon_of(other_steps, delta, kind, epsilon) >= epsilon:
        raise UserError(
            f"No noise keeps the training steps within privacy.epsilon={epsilon:g}: what is spent beside "
            "them is more than that. Raise privacy.epsilon, or lower privacy.selection_share."
        )
    unreached = UserError(
        f"The {kind} accountant cannot reckon with epsilon {epsilon:g}: raise privacy.epsilon, or the share "
        "of it that the choice of layers has (privacy.selection_share)"
        + (", or use privacy.accountant=prv." if kind == "rdp" else ".")
    )
    if epsilon < LEAST_EPSILON:
        raise unreached
    low = high = _guess(rate, times, epsilon, delta)
    try:
        while excess(high) > 0:
            low, high = high, high + STRIDE
    except (ValueError, OverflowError) as error:  # no Rényi order gives so small an ε: more noise overflows
        raise unreached from error
    while low > math.log(LEAST_NOISE) and excess(low) < 0:
        low, high = low - STRIDE, low
    near = brentq(excess, low, high, xtol=2e-4) if excess(low) > 0 else low
    # Rounded up, so that the budget holds exactly.
    while excess(near) > 0:
        near += 2e-4
    return math.exp(near)


def _guess(rate: float, times: int, epsilon: float, delta: float) -> float:
    """log σ by the central limit theorem of Gaussian differential privacy, a few percent off: where to look.

    μ = q √(T (exp(1/σ²) − 1)) is the whole run's, and δ = Φ(−ε/μ + μ/2) − exp(ε) Φ(−ε/μ − μ/2).
    """

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        log_second = epsilon + norm.logcdf(-epsilon / mu - mu / 2)
        return norm.cdf(-epsilon / mu + mu / 2) - math.exp(log_second) - delta

    mu = math.exp(brentq(excess, math.log(1e-4), math.log(100.0)))
    return -0.5 * math.log(math.log1p(mu**2 / (rate**2 * times)))
