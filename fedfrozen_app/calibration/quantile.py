"""An exact quantile of distributed numbers: each part counts its own, and only counts are summed.

Nonnegative float64 values have the same order as their bits read as integers. So the quantile is found byte
by byte: each part counts how many of its numbers start with the bytes known so far, by their next byte. Eight
sums of 256 counts give exactly the number that sorting all of them would give.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fedfrozen_app.calibration.masked_sum import Add, plain_sum

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Count = Callable[[int, int], Counts]  # (known leading bytes as a number, how many of them): 256 counts
BYTES = 8


def counter(numbers: Numbers) -> Count:
    """A part's counting function; its numbers must be finite and not negative."""
    values = np.ascontiguousarray(numbers, dtype=np.float64) + 0.0  # no -0.0: its sign bit is set
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError("scores are finite and not negative")
    keys = values.view(np.uint64)

    def count(known: int, length: int) -> Counts:
        shift = np.uint64(8 * (BYTES - 1 - length))
        begins = keys >> shift  # the first `length` + 1 bytes of each
        own = begins[begins >> np.uint64(8) == np.uint64(known)] & np.uint64(255)
        return np.bincount(own.astype(np.int64), minlength=256)

    return count


def rank_of(level: float, numbers: int) -> int:
    """Split conformal: the ⌈(n + 1)·level⌉-th smallest of n numbers, from 1."""
    return math.ceil(round((numbers + 1) * level, 9))  # 0.9 · 100 is more than 90 in floating point


def smallest(rank: int, parts: Sequence[Count], add: Add = plain_sum) -> float:
    """The `rank`-th smallest number of all parts; infinity beyond the last. `add` is exact for counts."""
    known = 0
    for length in range(BYTES):
        counts = np.rint(add([part(known, length).astype(np.float64) for part in parts])).astype(np.int64)
        below = np.cumsum(counts)
        if rank > below[-1]:
            return math.inf
        byte = int(np.searchsorted(below, rank))
        rank -= int(below[byte] - counts[byte])
        known = known << 8 | byte
    return float(np.array(known, dtype=np.uint64).view(np.float64))


def conformal_quantile(level: float, parts: Sequence[Count], numbers: int, add: Add = plain_sum) -> float:
    """The score that a new exchangeable row does not exceed with at least this probability."""
    return smallest(rank_of(level, numbers), parts, add)
