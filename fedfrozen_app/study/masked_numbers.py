"""A study's sums as a maskable vector: integers in 64-bit words, which add up exactly.

A number becomes round(number · 2^40), of which one word holds the lowest 48 bits and one the rest: words of
different sites are added separately, modulo 2^64. Counts are exact; other numbers have an error of at most
2^-41 per site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.secure.vector import WIDE, Vector
from fedfrozen_app.study.released_counts import STATUS
from fedfrozen_app.study.site_sums import SiteCounts
from fedfrozen_app.study.study_ask import COUNTS, Step, StudyAsk
from fedfrozen_app.survival.risk_sums import Likelihood, RiskSums

FRACTION, LOW = 40, 48  # bits
LARGEST = 2.0**60  # of a number, so that the sum over all sites fits into the two words
ERROR = 2.0 ** -(FRACTION + 1)  # largest error of a site's number


def vector_of(values: np.ndarray) -> Vector:
    """The unmasked vector. `UserError` for a number that is too large to be masked."""
    if len(values) and not np.abs(values).max() < LARGEST:
        raise UserError("A sum is too large to be masked: the covariates part the people too far.")
    whole = [round(math.ldexp(float(value), FRACTION)) for value in values]
    words = np.array([[one & (2**LOW - 1), (one >> LOW) % 2**64] for one in whole], dtype=object)
    return Vector(words.reshape(-1).astype(np.uint64).astype(WIDE), Vector.zeros(0, 0).body)


def numbers_of(total: Vector) -> np.ndarray:
    """Decode the numbers from a sum of such vectors."""
    low, high = total.head[0::2], total.head[1::2].view(np.dtype("<i8"))
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    return np.array([((above << LOW) + below) / 2**FRACTION for below, above in pairs])


def size_of(ask: StudyAsk, step: Step) -> int:
    """The number of values in a site's answer to this step."""
    size, times = len(ask.columns.covariates), len(step.times)
    if step.name == COUNTS:
        return len(ask.columns.levels) * len(STATUS) * times + (1 + 2 * size if size else 0)
    return sum(math.prod(shape) for shape in _shapes(ask, times))


def flat_counts(found: SiteCounts, ask: StudyAsk) -> np.ndarray:
    """The people by group, status and time, and the moments of the covariates."""
    assert found.tables is not None
    parts = [np.array(pair[status]["people"], dtype=float) for pair in found.tables for status in STATUS]
    if ask.columns.covariates:
        assert found.moments is not None
        people, sums, squares = found.moments
        parts += [np.array([float(people)]), sums, squares]
    return np.concatenate(parts)


def counts_of(numbers: np.ndarray, ask: StudyAsk, times: Sequence[float]) -> SiteCounts:
    """The inverse of `flat_counts`, for the sum over the sites."""
    levels, size = len(ask.columns.levels), len(ask.columns.covariates)
    cells = np.rint(numbers[: levels * len(STATUS) * len(times)]).astype(int)
    by_group = cells.reshape(levels, len(STATUS), len(times)).tolist()
    tables = [
        {status: {"times": list(times), "people": line} for status, line in zip(STATUS, lines, strict=True)}
        for lines in by_group
    ]
    rest, moments = numbers[cells.size :], None
    if size:
        moments = round(rest[0]), rest[1 : 1 + size], rest[1 + size :]
    return SiteCounts(1, None, None, tables, moments)


def flat_sums(found: RiskSums | Likelihood) -> np.ndarray:
    """The sums of one regression step as a flat array."""
    if isinstance(found, RiskSums):
        parts: Sequence[np.ndarray] = found.parts
    else:
        parts = (np.array([found.value]), found.gradient, found.information)
    return np.concatenate([part.reshape(-1) for part in parts])


def sums_of(numbers: np.ndarray, ask: StudyAsk, step: Step) -> RiskSums | Likelihood:
    shapes, parts, start = _shapes(ask, len(step.times)), [], 0
    for shape in shapes:
        parts.append(numbers[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    if ask.strata == "site":
        value, gradient, information = parts
        return Likelihood(float(value[0]), gradient, information)
    events, *others = parts
    return RiskSums(np.rint(events), *others)


def _shapes(ask: StudyAsk, times: int) -> list[tuple[int, ...]]:
    """The shapes of the parts of a step's answer."""
    size = len(ask.columns.covariates)
    if ask.strata == "site":
        return [(1,), (size,), (size, size)]
    width = 1 + size + size * (size + 1) // 2
    return [(times,), (size,), (times, width), (times if ask.ties == "efron" else 0, width)]
