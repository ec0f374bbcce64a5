"""Lower bounds of a time to event that hold with a stated coverage, whatever ended the follow-up.

A censored row's event time is unknown, but lies after the end of its follow-up. So a bound that the end of
follow-up reaches with probability 90 % is reached by the event with at least 90 %. This assumes nothing about
the censoring; heavy censoring makes the bounds early. Candès, Lei and Ren (2023, arXiv 2103.09763) start from
it; their sharper bounds also need the end of follow-up of rows with the event. Upper bounds are not possible
this way: events after the last follow-up are unobserved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from fedfrozen_app.calibration.calibration_rows import Part
from fedfrozen_app.calibration.masked_sum import Add, plain_sum
from fedfrozen_app.calibration.quantile import counter, rank_of, smallest
from fedfrozen_app.tasks.time_to_event import Cox

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LowerBound:
    """`threshold`: of the cumulative hazard; a row's bound is the time at which its hazard reaches it."""

    coverage: float
    threshold: float
    target: Cox
    temperature: None = None

    def scores(self, logits: Array, labels: Array) -> Array:
        """Each row's cumulative hazard at the end of its follow-up."""
        return self.target.hazard_until(logits, labels[:, 0])

    def covered(self, logits: Array, labels: Array) -> Array:
        """Whether each row was followed to its bound or beyond."""
        return self.scores(logits, labels) >= self.threshold

    def broken(self, logits: Array, labels: Array) -> Array:
        """Whether the event came before the bound. Other rows that are not covered were censored before
        it."""
        return ~self.covered(logits, labels) & (labels[:, 1] > 0)

    def sizes(self, logits: Array) -> Array:
        """The bound of each row."""
        return self.target.time_of_hazard(logits, self.threshold)


def lower_bound(parts: Sequence[Part], coverage: float, target: Cox, add: Add = plain_sum) -> LowerBound:
    """The ⌊(n + 1)(1 - coverage)⌋-th smallest score of all parts, from counts; 0 for too few rows."""
    scores = [LowerBound(coverage, 0.0, target).scores(part.logits, part.labels) for part in parts]
    count = sum(map(len, scores))
    rank = count + 1 - rank_of(coverage, count)
    threshold = smallest(rank, [counter(own) for own in scores], add) if rank else 0.0
    return LowerBound(coverage, threshold, target)
