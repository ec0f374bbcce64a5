"""Kaplan–Meier, Nelson–Aalen and the log-rank test, from counts by time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from fedfrozen_app.survival.counts import Counts

LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class Curve:
    """The survival curve of one group."""

    times: np.ndarray
    events: np.ndarray
    censored: np.ndarray
    at_risk: np.ndarray

    @cached_property
    def survival(self) -> np.ndarray:
        """Kaplan and Meier's estimate just after each time."""
        return np.cumprod(1.0 - self._share)

    @cached_property
    def hazard(self) -> np.ndarray:
        """Nelson and Aalen's cumulative hazard: the sum of events / at risk."""
        return np.cumsum(self._share)

    @cached_property
    def hazard_error(self) -> np.ndarray:
        """Aalen's standard error of the cumulative hazard."""
        return np.sqrt(np.cumsum(_ratio(self.events, self.at_risk**2)))

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Pointwise confidence intervals of the survival: Greenwood's variance of log(-log)."""
        wide = np.sqrt(np.cumsum(_ratio(self.events, self.at_risk * (self.at_risk - self.events))))
        z = stats.norm.ppf(0.5 + LEVEL / 2)
        inside = (self.survival > 0) & (self.survival < 1)
        log = np.log(np.where(inside, self.survival, 0.5))
        low, high = (np.exp(log * np.exp(side * z * wide / -log)) for side in (1, -1))
        same = np.where(self.survival >= 1, 1.0, 0.0)
        return np.where(inside, low, same), np.where(inside, high, same)

    def quantile(self, share: float = 0.5) -> float | None:
        """The first time at which at most this share survives; None if the curve never falls that far."""
        reached = np.flatnonzero(self.survival <= share + 1e-12)
        return float(self.times[reached[0]]) if len(reached) else None

    def at(self, time: float) -> tuple[float, float]:
        """(survival just after, people at risk just before) a time."""
        after = int(np.searchsorted(self.times, time, side="right"))
        before = int(np.searchsorted(self.times, time, side="left"))
        risk = self.at_risk[before] if before < len(self.times) else 0.0
        return (float(self.survival[after - 1]) if after else 1.0), float(risk)

    @cached_property
    def _share(self) -> np.ndarray:
        return _ratio(self.events, self.at_risk)


def curves(counts: Counts) -> list[Curve]:
    """One curve per group."""
    return [
        Curve(counts.times, events, censored, at_risk)
        for events, censored, at_risk in zip(counts.events, counts.censored, counts.at_risk, strict=True)
    ]


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(above)), where=below > 0)


@dataclass(frozen=True)
class LogRank:
    statistic: float
    degrees: int
    p: float
    observed: tuple[float, ...]  # events by group
    expected: tuple[float, ...]


def log_rank(counts: Counts) -> LogRank | None:
    """Test whether the groups' hazards are equal (Mantel 1966); None if fewer than two groups can be
    compared."""
    at_risk, events = counts.at_risk, counts.events
    everyone, died = at_risk.sum(axis=0), events.sum(axis=0)
    share = _ratio(at_risk, np.broadcast_to(everyone, at_risk.shape))
    expected = share * died
    among = died * _ratio(everyone - died, everyone - 1)
    variance = -np.einsum("gt,ht,t->gh", share, share, among)
    variance[np.diag_indices(len(share))] += share @ among
    apart = (events - expected).sum(axis=1)
    rank = int(np.linalg.matrix_rank(variance, tol=1e-9 * max(np.trace(variance), 1e-300), hermitian=True))
    if rank == 0:
        return None
    statistic = float(apart @ np.linalg.pinv(variance, rcond=1e-9, hermitian=True) @ apart)
    p = float(stats.chi2.sf(statistic, rank))
    return LogRank(
        statistic, rank, p, tuple(events.sum(axis=1).tolist()), tuple(expected.sum(axis=1).tolist())
    )
