"""Cox regression by Newton's method: each step requests sums from the sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.survival.estimates import LEVEL
from fedfrozen_app.survival.risk_sums import Likelihood, Scale

MOST_STEPS = 30
HALVINGS = 10
EXACT = 1e-16  # predicted gain in likelihood of a further step: the coefficients are then within 1e-8
SINGULAR = 1e-9  # smallest of the information's eigenvalues, as a share of the largest
LARGEST = 25.0  # of a coefficient per standard deviation: a hazard ratio beyond 10^10 means separation
TIES = ("efron", "breslow")


@dataclass(frozen=True)
class Cox:
    names: tuple[str, ...]
    coefficients: np.ndarray
    errors: np.ndarray
    value: float  # the log partial likelihood
    value_at_zero: float
    steps: int
    ties: str
    stratified: bool

    @property
    def p(self) -> np.ndarray:
        """The p-value of each coefficient, by Wald's test."""
        return 2 * stats.norm.sf(np.abs(self.coefficients / self.errors))

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Confidence intervals of the hazard ratios."""
        wide = stats.norm.ppf(0.5 + LEVEL / 2) * self.errors
        return np.exp(self.coefficients - wide), np.exp(self.coefficients + wide)

    @property
    def ratio_test(self) -> tuple[float, float]:
        """The likelihood ratio test of all coefficients together: (statistic, p)."""
        statistic = 2 * (self.value - self.value_at_zero)
        return statistic, float(stats.chi2.sf(statistic, len(self.names)))


def scale_of(names: Sequence[str], people: int, sums: np.ndarray, squares: np.ndarray) -> Scale:
    """From the sums of the covariates and of their squares over all sites."""
    if people < 1:
        raise UserError("No site counts anybody for a regression.")
    with np.errstate(over="ignore", invalid="ignore"):
        centre = sums / people
        variance = np.maximum(squares / people - centre**2, 0.0)
    if not np.isfinite(variance).all():
        raise _not_finite(names)
    for name, spread, mean in zip(names, variance, centre, strict=True):
        if spread <= 1e-12 * (1.0 + mean**2):
            raise UserError(f"The covariate {name} has one value at all sites: leave it out of --covariates.")
    return Scale(centre, np.sqrt(variance))


def fit_cox(
    names: Sequence[str],
    scale: Scale,
    ask: Callable[[np.ndarray], Likelihood],
    ties: str,
    stratified: bool,
) -> Cox:
    """Fit the model. `ask` returns the pooled likelihood of all sites at given scaled coefficients."""
    at = np.zeros(len(names))
    now = first = ask(at)
    _check_varies(names, now)
    steps = 0
    while True:
        move = np.linalg.solve(now.information, now.gradient)
        promised = float(now.gradient @ move)
        if promised <= EXACT:
            break
        at, now = _moved(at, move, now, ask)
        steps += 1
        if not np.abs(at).max() <= LARGEST or _least(now) is None or steps == MOST_STEPS:
            raise _separated(names, at)
    covariance = np.linalg.inv(now.information)
    errors = np.sqrt(np.diag(covariance)) / scale.width
    return Cox(tuple(names), at / scale.width, errors, now.value, first.value, steps, ties, stratified)


def _moved(
    at: np.ndarray, move: np.ndarray, now: Likelihood, ask: Callable[[np.ndarray], Likelihood]
) -> tuple[np.ndarray, Likelihood]:
    """Take a step, halved while it decreases the likelihood by more than rounding."""
    least = now.value - 1e-9 * (1.0 + abs(now.value))
    for _ in range(HALVINGS):
        found = ask(at + move)
        if np.isfinite(found.value) and found.value >= least:
            break
        move = move / 2
    return at + move, found


def _least(found: Likelihood) -> np.ndarray | None:
    """The direction of least curvature of the likelihood; None if it is flat there, or not a number."""
    if not _is_finite(found):
        return None
    values, vectors = np.linalg.eigh(found.information)
    return vectors[:, 0] if values[0] > SINGULAR * max(values[-1], 1e-300) else None


def _is_finite(found: Likelihood) -> bool:
    return all(np.isfinite(part).all() for part in (found.value, found.gradient, found.information))


def _not_finite(names: Sequence[str]) -> UserError:
    return UserError(f"The sums for {', '.join(names)} are not finite: look for values far from all others.")


def _check_varies(names: Sequence[str], found: Likelihood) -> None:
    """`UserError` for covariates that do not vary: at coefficients of 0, only they make a direction flat."""
    if not _is_finite(found):
        raise _not_finite(names)
    if _least(found) is not None:
        return
    _, vectors = np.linalg.eigh(found.information)
    involved = [name for name, part in zip(names, vectors[:, 0], strict=True) if abs(part) > 0.1]
    if len(involved) == 1:
        raise UserError(
            f"The covariate {involved[0]} does not vary among those at risk at the events: leave it out."
        )
    raise UserError(f"The covariates {' and '.join(involved)} determine each other: leave one of them out.")


def _separated(names: Sequence[str], at: np.ndarray) -> UserError:
    worst = names[int(np.argmax(np.abs(at)))]
    return UserError(
        f"The coefficient of {worst} grows without end: it parts those with the event from those without. "
        "Leave it out, or join its values."
    )
