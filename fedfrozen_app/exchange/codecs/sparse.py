"""A share of each update's values, sent exactly with their places; the client adds the rest to its next one.

Error feedback: Stich et al., Sparsified SGD with Memory, 2018; Karimireddy et al., 2019. The unsent part is
kept: sent + kept = update + previously kept, to the bit.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.digests import raw_bytes
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec

INDEX, SEED = np.dtype("<u4"), np.dtype("<u8")


class Sparse(UpdateCodec):
    settings = ("share",)
    error_feedback = True

    def kept(self, count: int) -> int:
        """The number of values of an array that are sent: at least one."""
        return math.ceil(self.values["share"] * count)

    def _joined(self, where: np.ndarray, values: Tensor) -> np.ndarray:
        return np.concatenate([where.view(np.uint8), np.frombuffer(raw_bytes(values), np.uint8)])

    def _filled(self, places: np.ndarray, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        update = torch.zeros(count, dtype=dtype)
        update[torch.from_numpy(places)] = torch.from_numpy(data.copy()).view(dtype)
        return update


class TopK(Sparse):
    """The largest values, with their places as a bit per value or an index per sent value, if shorter."""

    def size(self, count: int, itemsize: int) -> int:
        return self._where(count) + self.kept(count) * itemsize

    def _where(self, count: int) -> int:
        return min(-(-count // 8), self.kept(count) * INDEX.itemsize)

    def _by_mask(self, count: int) -> bool:
        return self._where(count) == -(-count // 8)

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        count = len(update)
        mask = _largest(update.abs().double().numpy(), self.kept(count))
        values = update[torch.from_numpy(mask)]
        where = np.packbits(mask) if self._by_mask(count) else np.flatnonzero(mask).astype(INDEX)
        return self._joined(where, values)

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        split, kept = self._where(count), self.kept(count)
        where = data[:split]
        if self._by_mask(count):
            bits = np.unpackbits(where)
            places = np.flatnonzero(bits)
            if len(places) != kept or bits[count:].any():
                raise ValueError(f"its mask does not name {kept} of {count} values")
        else:
            places = where.copy().view(INDEX).astype(np.int64)
            if (places >= count).any() or (np.diff(places) <= 0).any():
                raise ValueError(f"its indices do not name {kept} of {count} values in order")
        return self._filled(places, data[split:], count, dtype)


class RandomK(Sparse):
    """Values at random places; the seed is sent instead of the places."""

    def size(self, count: int, itemsize: int) -> int:
        return SEED.itemsize + self.kept(count) * itemsize

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        seed = drawn.integers(0, 2**64, 1, dtype=SEED)
        places = self._places(int(seed[0]), len(update))
        return self._joined(seed, update[torch.from_numpy(places)])

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        seed = int(data[: SEED.itemsize].copy().view(SEED)[0])
        return self._filled(self._places(seed, count), data[SEED.itemsize :], count, dtype)

    def _places(self, seed: int, count: int) -> np.ndarray:
        """The first places of a random permutation. The raw output is the same in all NumPy versions."""
        words = np.random.Philox(key=seed).random_raw(count)
        return np.sort(np.argpartition(words, self.kept(count) - 1)[: self.kept(count)])


def _largest(sizes: np.ndarray, kept: int) -> np.ndarray:
    """Which values are sent; the first in a tie, on every machine. NaNs are sent, to be detected."""
    sizes = np.nan_to_num(sizes, nan=np.inf, posinf=np.inf)
    least = np.partition(sizes, len(sizes) - kept)[len(sizes) - kept]
    mask = sizes > least
    mask[np.flatnonzero(sizes == least)[: kept - int(mask.sum())]] = True
    return mask
