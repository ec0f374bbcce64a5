"""A differentially private quantile of scores between 0 and 1, by binary search.

Each step asks every part how many of its scores lie below the midpoint and how many above, and adds two-sided
geometric noise to both counts. Adding or removing a score changes one of them by 1, so a step with noise for
epsilon / `STEPS` has that epsilon, and all steps together have epsilon, delta 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedfrozen_app.calibration.masked_sum import Add, plain_sum
from fedfrozen_app.census.noised import geometric, spread
from fedfrozen_app.privacy.keystream import Keystream

Numbers = npt.NDArray[np.float64]
STEPS = 10  # the threshold is a multiple of 2^-10


@dataclass(frozen=True)
class PrivateQuantile:
    value: float
    numbers: int  # number of scores, with noise
    deviation: float  # standard deviation of the share of rows below, from one step's noise


def private_quantile(
    level: float, parts: Sequence[Numbers], epsilon: float, add: Add = plain_sum
) -> PrivateQuantile:
    """The smallest multiple of 2^-`STEPS` below which this share of rows lies, by the noisy counts."""
    low, high, count = 0.0, 1.0, 0
    streams = [Keystream() for _ in parts]
    for _ in range(STEPS):
        middle = (low + high) / 2
        sums = add([_noised(own, middle, epsilon, s) for own, s in zip(parts, streams, strict=True)])
        below, count = round(float(sums[0])), round(float(sums.sum()))
        low, high = (low, middle) if below >= level * (count + 1) else (middle, high)
    noise = spread(epsilon, STEPS) * math.sqrt(len(parts) * ((1 - level) ** 2 + level**2))
    return PrivateQuantile(high, max(count, 0), noise / max(count, 1))


def _noised(numbers: Numbers, middle: float, epsilon: float, stream: Keystream) -> Numbers:
    below = int((numbers <= middle).sum())
    counts = np.array([below, len(numbers) - below])
    return np.asarray(counts + geometric(2, epsilon / STEPS, stream), dtype=np.float64)
