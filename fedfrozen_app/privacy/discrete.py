"""Discrete Gaussian noise: whole numbers x with chances proportional to exp(−x²/2σ²).

Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020: it costs the Rényi
divergence of the continuous one. A sum of shares is no discrete Gaussian, but as near to one as matters:
Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism, 2021, bound the difference by
10·n·exp(−π²σ²) for n shares of σ each, which is less than 10⁻⁴⁰⁰ where σ is at least `LEAST`.
"""

import math
from collections.abc import Callable

import numpy as np

LEAST = 10.0  # standard deviation of a share, in units
REACH = 12.0  # standard deviations: what lies beyond has a chance below 10⁻³²
CHUNK = 1 << 17
Words = Callable[[int], np.ndarray]  # so many whole numbers of 64 bits, each equally likely


def discrete_gaussian(count: int, std: float, words: Words) -> np.ndarray:
    """(count,) of int64. Drawn evenly within reach and kept by chance: each chance is right to 2⁻⁵⁰."""
    reach = math.ceil(REACH * std)
    span = 2 * reach + 1
    even = np.uint64(2**64 - 1 - (2**64 % span))  # beyond it some numbers would be more likely than others
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
