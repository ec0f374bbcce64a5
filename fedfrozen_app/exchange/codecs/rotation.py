"""A random rotation: signs, then the Walsh-Hadamard transform, in segments whose lengths are powers of two.

It spreads a few large values over a whole segment, so that the largest value of a block, which sets the step
of its quantisation, is small (Suresh et al., Distributed Mean Estimation with Limited Communication, 2017).
Segments need no padding: 300 values are rotated as 256 + 32 + 8 + 4.
"""

from collections.abc import Iterator

import numpy as np

LONGEST = 1 << 12


def rotated(values: np.ndarray) -> np.ndarray:
    """A rotated copy, of the same length and norm."""
    return _transformed(values * signs(len(values)))


def unrotated(values: np.ndarray) -> np.ndarray:
    """The inverse; the transform is its own inverse."""
    return _transformed(values.copy()) * signs(len(values))


def signs(count: int) -> np.ndarray:
    """±1, the same for every rotation of `count` values. The signs are public and independent of the data;
    the raw output of this generator is the same in every version of NumPy."""
    words = np.random.Philox(key=count).random_raw(-(-count // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=count)
    return np.where(bits, 1.0, -1.0)


def segments(count: int) -> Iterator[tuple[int, int, int]]:
    """(start, length, number of consecutive segments of this length)."""
    start, whole = 0, count // LONGEST
    if whole:
        yield 0, LONGEST, whole
        start = whole * LONGEST
    rest = count - start
    while rest:
        length = 1 << (rest.bit_length() - 1)
        yield start, length, 1
        start, rest = start + length, rest - length


def _transformed(values: np.ndarray) -> np.ndarray:
    """Apply the orthonormal transform to each segment, in place."""
    for start, length, number in segments(len(values)):
        part = values[start : start + length * number].reshape(number, length)
        width = 1
        while width < length:
            pairs = part.reshape(number, -1, 2, width)
            left, right = pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]
            pairs[:, :, 0], pairs[:, :, 1] = left, right
            width *= 2
        part /= np.sqrt(length)
    return values
