"""Numbers of events and censorings at each time, from which all curves are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfrozen_app.survival.people import People


@dataclass(frozen=True)
class Counts:
    """Counts by group and time: exact integers, or noisy ones."""

    times: np.ndarray  # (times,) that increase
    events: np.ndarray  # (groups, times)
    censored: np.ndarray  # (groups, times); those censored at a time are still at risk at it

    @property
    def at_risk(self) -> np.ndarray:
        """(groups, times) just before each time."""
        left = self.events + self.censored
        return left[:, ::-1].cumsum(axis=1)[:, ::-1]

    @property
    def people(self) -> np.ndarray:
        """(groups,)"""
        return (self.events + self.censored).sum(axis=1)

    def all_groups(self) -> Counts:
        """All groups pooled into one."""
        return Counts(
            self.times, self.events.sum(axis=0, keepdims=True), self.censored.sum(axis=0, keepdims=True)
        )


def count(people: People, times: np.ndarray, groups: int) -> Counts:
    """One site's counts; every person's time is one of `times`."""
    place = np.searchsorted(times, people.time)
    cell = people.group * len(times) + place
    size = groups * len(times)
    events = np.bincount(cell[people.event], minlength=size).reshape(groups, len(times))
    censored = np.bincount(cell[~people.event], minlength=size).reshape(groups, len(times))
    return Counts(times, events, censored)


def add(parts: Sequence[Counts]) -> Counts:
    """Sum over the sites, at the union of their times."""
    times = np.unique(np.concatenate([part.times for part in parts]))
    groups = len(parts[0].events)
    events, censored = np.zeros((groups, len(times))), np.zeros((groups, len(times)))
    for part in parts:
        place = np.searchsorted(times, part.times)
        events[:, place] += part.events
        censored[:, place] += part.censored
    return Counts(times, events, censored)


def without_noise_below_zero(counts: Counts) -> Counts:
    """Project noisy counts to the nearest nonnegative ones with the same sum per group (if that is positive).
    The number at risk then never increases. Post-processing of noisy counts: it costs no epsilon."""
    both = np.concatenate([counts.events, counts.censored], axis=1).astype(float)
    found = np.stack([_projected(line) for line in both])
    size = len(counts.times)
    return Counts(counts.times, found[:, :size], found[:, size:])


def _projected(values: np.ndarray) -> np.ndarray:
    """Project onto the simplex of this sum (Duchi et al. 2008): subtract a constant and clip at 0."""
    total = values.sum()
    if total <= 0:
        return np.zeros(len(values))
    falling = np.sort(values)[::-1]
    excess = (falling.cumsum() - total) / np.arange(1, len(values) + 1)
    last = np.flatnonzero(falling > excess)[-1]
    return np.maximum(values - excess[last], 0.0)
