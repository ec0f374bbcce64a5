"""Updates as small integers, with one scale per block of values.

The largest value of a block sets its scale s = max|u|/L; each value becomes ⌊u/s + r⌋ with r uniform in
[0, 1), so that its expectation is u (stochastic rounding; Alistarh et al., QSGD, 2017). No value changes by s
or more. The wire format is the scales as float32, then the levels in `bits` each.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.codecs.rotation import rotated, unrotated
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec

SCALE = np.dtype("<f4")


class Quantised(UpdateCodec):
    settings = ("block", "rotate")
    bits: ClassVar[int]

    @property
    def block(self) -> int:
        return int(self.values["block"])

    @property
    def levels(self) -> int:
        """The largest level; the smallest is its negative, so that rounding favours neither side."""
        return 2 ** (self.bits - 1) - 1

    def size(self, count: int, itemsize: int) -> int:
        return -(-count // self.block) * SCALE.itemsize + -(-count * self.bits // 8)

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        values = update.double().numpy()
        if self.values["rotate"]:
            values = rotated(values)
        blocks = self._blocks(values)
        scales = self._scales(blocks)
        with np.errstate(divide="ignore", invalid="ignore"):
            levels = np.floor(blocks / scales[:, None] + drawn.random(blocks.shape))
        levels[~np.isfinite(levels)] = 0  # a zero update, or one that is not finite, which its scale shows
        bound = self.levels
        packed = self._packed(levels.clip(-bound, bound).astype(np.int8).reshape(-1)[: len(values)])
        return np.concatenate([scales.view(np.uint8), packed])

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        split = -(-count // self.block) * SCALE.itemsize
        scales = data[:split].copy().view(SCALE)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise ValueError("it has a scale that is no positive number")
        levels = self._levels(data[split:], count)
        if (np.abs(levels) > self.levels).any():
            raise ValueError(f"it has levels beyond {self.levels}")
        values = (self._blocks(levels) * scales.astype(np.float64)[:, None]).reshape(-1)[:count]
        if self.values["rotate"]:
            values = unrotated(values)
        return torch.from_numpy(values).to(dtype)

    def _blocks(self, values: np.ndarray) -> np.ndarray:
        """(blocks, block), the last one filled with zeros."""
        filled = np.zeros(-(-len(values) // self.block) * self.block)
        filled[: len(values)] = values
        return filled.reshape(-1, self.block)

    def _scales(self, blocks: np.ndarray) -> np.ndarray:
        """Scales, rounded up to float32 so that the largest value stays within the levels."""
        exact = np.abs(blocks).max(axis=1, initial=0.0) / self.levels
        scales = exact.astype(SCALE)
        return np.where(scales < exact, np.nextafter(scales, SCALE.type(np.inf)), scales)

    def _packed(self, levels: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _levels(self, data: np.ndarray, count: int) -> np.ndarray:
        raise NotImplementedError


class Int8(Quantised):
    """One byte per value, and four per block."""

    bits = 8

    def _packed(self, levels: np.ndarray) -> np.ndarray:
        return levels.view(np.uint8)

    def _levels(self, data: np.ndarray, count: int) -> np.ndarray:
        return data.view(np.int8).astype(np.int16)


class Int4(Quantised):
    """Half a byte per value, the first of two in the lower half, and four bytes per block."""

    bits = 4

    def _packed(self, levels: np.ndarray) -> np.ndarray:
        halves = np.zeros(len(levels) + len(levels) % 2, np.uint8)
        halves[: len(levels)] = levels.view(np.uint8) & 15
        return halves[::2] | halves[1::2] << 4

    def _levels(self, data: np.ndarray, count: int) -> np.ndarray:
        halves = np.stack([data & 15, data >> 4], axis=1).reshape(-1)
        if halves[count:].any():
            raise ValueError("it has something after its last level")
        return (halves[:count].astype(np.int16) ^ 8) - 8
