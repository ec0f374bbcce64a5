"""Lower bounds on epsilon from an adversary's guesses in one run.

Each of m canaries was planted by a coin toss. An adversary who sees what the client sent, and knows all of
its data except the coins, guesses r of them and is right C times. p_i is the probability that C = i.

**The claim's own curve** (Mahloujifar, Melis and Chaudhuri 2024, arXiv 2410.22235). For every probability x
of an event without an example, the steps paid for bound its probability with the example by F(x). Take the
event "canary j is guessed correctly, and so are at least k − 1 of the others", and flip j's coin:

    Σ_{i ≥ k} i·p_i / m  ≤  F( Σ_{i ≥ k−1} (r − i)·p_i / m )        for every k

If the claim held and P(C ≥ c) were 5 %, these inequalities, from k = c downwards, would require ever larger
p_i; if they require a total above 1, the claim is refuted. That is the verdict.

**No curve at all** (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846, theorem 5.2): for any (ε, δ)-private
mechanism the tail of C is at most a binomial's, plus a term for δ. That bound needs no accountant, but it is
weak: with δ = 1e-5 no number of canaries raises it to 7.

The best number of guesses depends on the violation, so several numbers are tried, each with its share of the
5 % error probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from fedfrozen_app.privacy.accountant import Curve, curve_of, epsilon_bounds, rough_epsilon
from fedfrozen_app.privacy.steps import Steps

CONFIDENCE = 0.95
SHARES = (
    0.05,
    0.25,
    0.4,
    1.0,
)  # shares of canaries to guess; some of the planted half are never sampled
DOUBT = (1 - CONFIDENCE) / len(SHARES)
MOST_EPSILON = 50.0
LEAST_NOISE = 1e-3  # in units of the bound: with less, likelihoods overflow, and every guess is certain
PRECISE = 0.01  # relative precision of the noise scale for which a bound is computed


@dataclass(frozen=True)
class CanaryResult:
    canaries: int
    planted: int
    guesses: int
    right: int
    refuted: bool  # whether the claim is refuted, with 95 % confidence
    could_refute: bool  # whether it would be refuted if every guess were right
    epsilon_lower: float  # refutes that these steps, at any noise, spend at most this
    epsilon_most: float  # the same if every guess were right: the most that this number of canaries can show
    epsilon_lower_any: float  # theorem 5.2's bound, for any mechanism


def evaluate_canaries(
    seen: np.ndarray, coins: np.ndarray, paid_for: tuple[Steps, ...], delta: float
) -> CanaryResult:
    """`seen`: (steps, canaries), the sent value along each canary minus the rows' part, in units of the
    bound."""
    scores = likelihoods(seen, paid_for[-1].rate)
    ranked = np.argsort(-np.abs(scores), kind="stable")  # the most certain first
    right = np.cumsum((scores > 0)[ranked] == coins[ranked])
    tries = [(r, int(right[r - 1])) for r in numbers_of_guesses(len(coins))]
    perfect = [(r, r) for r, _ in tries]
    curve = curve_of(paid_for, delta)
    guesses, correct = max(
        tries, key=lambda one: epsilon_lower(len(coins), one[0], one[1], delta), default=(0, 0)
    )
    return CanaryResult(
        canaries=len(coins),
        planted=int(coins.sum()),
        guesses=guesses,
        right=correct,
        refuted=refutes(len(coins), tries, curve),
        could_refute=refutes(len(coins), perfect, curve),
        epsilon_lower=epsilon_refuted(len(coins), tries, paid_for, delta),
        epsilon_most=epsilon_refuted(len(coins), perfect, paid_for, delta),
        epsilon_lower_any=epsilon_lower(len(coins), guesses, correct, delta),
    )


def likelihoods(seen: np.ndarray, rate: float) -> np.ndarray:
    """Each canary's log-likelihood ratio of being planted: Σ_t log(1 − q + q·e^((2x_t − 1)/2σ²)).

    No test for a subsampled Gaussian is stronger. σ is estimated from `seen` itself, by the median, which the
    few steps with a canary hardly affect: an adversary does not rely on the promised noise.
    """
    if not seen.size:
        return np.zeros(seen.shape[1])
    noise = max(float(np.nanmedian(np.abs(seen))) / 0.6745, LEAST_NOISE)
    gain = (2 * seen - 1) / (2 * noise**2)
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    with np.errstate(invalid="ignore"):  # NaN where a canary's array did not train: no evidence
        return np.nansum(np.logaddexp(absent, math.log(rate) + gain), axis=0)


def numbers_of_guesses(canaries: int) -> list[int]:
    return sorted({round(share * canaries) for share in SHARES} - {0})


# The claim's own curve -----------------------------------------------------------------------------------


def refutes(canaries: int, tries: Sequence[tuple[int, int]], curve: Curve) -> bool:
    """Whether the claim is refuted. `tries`: (number of guesses, how many of them were right)."""
    return any(impossible(canaries, guesses, right, DOUBT, curve) for guesses, right in tries)


def impossible(canaries: int, guesses: int, right: int, doubt: float, curve: Curve) -> bool:
    """Whether no mechanism with this curve is right this often with probability `doubt`."""
    # All of that probability at C = right: more right guesses would be harder still.
    mass = doubt
    hits, misses = doubt * right / canaries, doubt * (guesses - right) / canaries
    for count in range(right - 1, -1, -1):
        needed = curve.least_chance(hits) - misses
        if needed > 0:
            chance = needed * canaries / (guesses - count)
            mass += chance
            if mass > 1:
                return True
            hits += chance * count / canaries
            misses += needed
    return False


def epsilon_refuted(
    canaries: int, tries: Sequence[tuple[int, int]], paid_for: tuple[Steps, ...], delta: float
) -> float:
    """The largest ε that is refuted for steps of these rates and numbers, over all noise scales."""

    def scaled(log_scale: float) -> tuple[Steps, ...]:
        return tuple(step._replace(noise=step.noise * math.exp(log_scale)) for step in paid_for)

    def ruled_out(log_scale: float) -> bool:
        if rough_epsilon(scaled(log_scale), delta) > MOST_EPSILON:  # beyond any real claim, and exp overflows
            return False
        return refutes(canaries, tries, curve_of(scaled(log_scale), delta))

    low, high = -math.log(20), math.log(20)
    if not ruled_out(high):
        return 0.0
    while high - low > PRECISE:
        middle = (low + high) / 2
        low, high = (low, middle) if ruled_out(middle) else (middle, high)
    return epsilon_bounds(scaled(high), delta)[0]


# No curve at all -----------------------------------------------------------------------------------------


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of this many right guesses under (ε, δ)-privacy (theorem 5.2)."""
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return tail
    # α = max over i of P(right − i ≤ B < right) / i
    below = binom.pmf(np.arange(right - 1, -1, -1), guesses, chance).cumsum()
    alpha = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * alpha)


def epsilon_lower(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The largest ε that this many right guesses rule out; 0 if they rule out none."""

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, right, epsilon, delta) - DOUBT

    if excess(0.0) >= 0:
        return 0.0
    return MOST_EPSILON if excess(MOST_EPSILON) < 0 else float(brentq(excess, 0.0, MOST_EPSILON))
