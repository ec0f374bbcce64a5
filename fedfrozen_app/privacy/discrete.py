"""Discrete Gaussian noise: integers x with probabilities proportional to exp(−x²/2σ²).

Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020: it costs the Rényi
divergence of the continuous one. A sum of shares is not a discrete Gaussian, but is close enough:
Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism, 2021, bound the difference by
10·n·exp(−π²σ²) for n shares of σ each, which is less than 10⁻⁴⁰⁰ where σ is at least `LEAST`.
"""

import math
from collections.abc import Callable

import numpy as np

LEAST = 10.0  # standard deviation of a share, in units
REACH = 12.0  # standard deviations; larger values have a probability below 10⁻³²
CHUNK = 1 << 17
Words = Callable[[int], np.ndarray]  # this many uniform integers of 64 bits


def discrete_gaussian(count: int, std: float, words: Words) -> np.ndarray:
    """(count,) of int64, by rejection sampling within REACH; each probability is accurate to 2⁻⁵⁰."""
    reach = math.ceil(REACH * std)
    span = 2 * reach + 1
    even = np.uint64(2**64 - 1 - (2**64 % span))  # larger words would bias the remainder
    found, filled = np.empty(count, np.int64), 0
    while filled < count:
        tries = min(CHUNK, 11 * (count - filled) + 64)
        drawn = words(2 * tries)
        place, coin = drawn[:tries], drawn[tries:]
        x = (place % np.uint64(span)).astype(np.int64) - reach
        chance = np.exp(-0.5 * np.square(x / std))
        kept = x[((coin >> np.uint64(11)) * 2.0**-53 < chance) & (place <= even)][: count - filled]
        found[filled : filled + len(kept)] = kept
        filled += len(kept)
    return found
