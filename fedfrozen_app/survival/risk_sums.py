"""One site's part of a Cox regression: sums over its people, for given coefficients.

A person is in the risk set of every event time up to their own. So the sum over a risk set is a cumulative
sum over those who leave at each later time: a site sends the terms, and the server adds them up (Lu et al.
2015). Efron's rule for ties also takes the sums over the people who have the event at each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedfrozen_app.survival.people import People

LARGEST_BLOCK = 2**22  # numbers


@dataclass(frozen=True)
class Scale:
    """Centre and width by which all sites standardize the covariates, so that no sum depends on their
    units."""

    centre: np.ndarray  # (covariates,)
    width: np.ndarray  # (covariates,)

    def of(self, people: People) -> np.ndarray:
        return (people.covariates - self.centre) / self.width


@dataclass(frozen=True)
class RiskSums:
    """Sums by event time t. Pairs of covariates are those of the upper triangle."""

    events: np.ndarray  # (times,)
    event_covariates: np.ndarray  # (covariates,) the sum over all people with the event
    leaving: (
        np.ndarray
    )  # (times, 1 + covariates + pairs): sums of r, r·x and r·x·x, with r = exp(coefficients · x)
    tied: np.ndarray  # the same over the people with the event at t; no times under Breslow's rule

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))


def risk_sums(
    people: People, times: np.ndarray, scale: Scale, coefficients: np.ndarray, ties: str
) -> RiskSums:
    """`times` are the event times of all sites together. People who leave before the first do not count."""
    values = scale.of(people)
    ratio = np.exp(values @ coefficients)
    place = (
        np.searchsorted(times, people.time, side="right") - 1
    )  # the last event time at which each person is at risk
    first, second = np.triu_indices(values.shape[1])
    terms = np.concatenate(
        [ratio[:, None], ratio[:, None] * values, ratio[:, None] * values[:, first] * values[:, second]],
        axis=1,
    )
    inside = place >= 0
    happened = people.event & inside
    tied = (
        _by_time(terms[happened], place[happened], len(times))
        if ties == "efron"
        else np.zeros((0, terms.shape[1]))
    )
    return RiskSums(
        np.bincount(place[happened], minlength=len(times)).astype(float),
        values[happened].sum(axis=0),
        _by_time(terms[inside], place[inside], len(times)),
        tied,
    )


def _by_time(terms: np.ndarray, place: np.ndarray, times: int) -> np.ndarray:
    found = np.zeros((times, terms.shape[1]))
    np.add.at(found, place, terms)
    return found


def add_sums(parts: Sequence[RiskSums]) -> RiskSums:
    return RiskSums(*(np.sum(part, axis=0) for part in zip(*(one.parts for one in parts), strict=True)))


@dataclass(frozen=True)
class Likelihood:
    """The log partial likelihood at some coefficients, its gradient, and its negative Hessian."""

    value: float
    gradient: np.ndarray
    information: np.ndarray

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(
            self.value + other.value, self.gradient + other.gradient, self.information + other.information
        )


def likelihood(sums: RiskSums, coefficients: np.ndarray) -> Likelihood:
    """Breslow's likelihood if the sums have no ties, otherwise Efron's."""
    size = len(coefficients)
    at_risk = sums.leaving[::-1].cumsum(axis=0)[::-1]
    value = float(coefficients @ sums.event_covariates)
    gradient, information = sums.event_covariates.copy(), np.zeros((size, size))
    efron = len(sums.tied) > 0
    for place in np.flatnonzero(sums.events):
        died = sums.events[place]
        weight = 1.0 if efron else died
        for steps in _steps(int(died), at_risk.shape[1]) if efron else [np.zeros(1)]:
            total = at_risk[place] - steps[:, None] * (sums.tied[place] if efron else 0.0)
            mean = total[:, 1 : 1 + size] / total[:, :1]
            square = np.zeros((size, size))
            square[np.triu_indices(size)] = (total[:, 1 + size :] / total[:, :1]).sum(axis=0)
            square += np.triu(square, 1).T
            value -= weight * float(np.log(total[:, 0]).sum())
            gradient -= weight * mean.sum(axis=0)
            information += weight * (square - mean.T @ mean)
    return Likelihood(value, gradient, information)


def _steps(died: int, width: int) -> Iterator[np.ndarray]:
    """Efron's fractions of those who have the event at one time, in blocks that fit into memory."""
    size = max(1, LARGEST_BLOCK // width)
    for first in range(0, died, size):
        yield np.arange(first, min(first + size, died)) / died
