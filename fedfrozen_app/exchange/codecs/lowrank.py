"""Matrices as two low-rank factors: U ≈ PQᵀ, with error feedback into the next update.

PowerSGD (Vogels et al. 2019, arXiv 1905.13727): Q is drawn at random, P = orth(UQ), Q = UᵀP. Two such steps
replace a warm start from the last round's Q, so that a client keeps nothing but the error. A convolution's
weights are a matrix with one row per output. Vectors, and matrices that are no larger than their factors, are
sent exactly.
"""

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.digests import raw_bytes
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec

STEPS = 2


class LowRank(UpdateCodec):
    settings = ("rank",)
    error_feedback = True
    codes_adapters = False

    def size_of(self, array: Tensor) -> int:
        rows, columns = _matrix(array)
        if not self._is_factored(rows, columns):
            return array.numel() * array.element_size()
        return self.rank * (rows + columns) * _factors(array).itemsize

    @property
    def rank(self) -> int:
        return int(self.values["rank"])

    def _is_factored(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) < rows * columns

    def pack_array(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        rows, columns = _matrix(update)
        if not self._is_factored(rows, columns):
            return np.frombuffer(raw_bytes(update), np.uint8).copy()
        matrix = update.double().numpy().reshape(rows, columns)
        right = drawn.standard_normal((columns, self.rank))
        for _ in range(STEPS):
            left, _ = np.linalg.qr(matrix @ right)
            right = matrix.T @ left
        both = np.concatenate([left.reshape(-1), right.reshape(-1)]).astype(_factors(update))
        return both.view(np.uint8)

    def unpack_array(self, data: np.ndarray, like: Tensor) -> Tensor:
        rows, columns = _matrix(like)
        if not self._is_factored(rows, columns):
            exact = torch.frombuffer(bytearray(data), dtype=like.dtype) if len(data) else torch.empty(0)
            return exact.to(like.dtype).view(like.shape)
        both = data.copy().view(_factors(like)).astype(np.float64)
        left = both[: rows * self.rank].reshape(rows, self.rank)
        right = both[rows * self.rank :].reshape(columns, self.rank)
        # Not a matrix product, whose last bits depend on the library and its threads: all sides must decode
        # the same bits.
        matrix = np.zeros((rows, columns))
        for column in range(self.rank):
            matrix += left[:, column, None] * right[None, :, column]
        return torch.from_numpy(matrix).to(like.dtype).view(like.shape)


def _matrix(array: Tensor) -> tuple[int, int]:
    """The numbers of rows and columns; a vector is one row."""
    if array.ndim < 2 or not array.numel():
        return 1, array.numel()
    return len(array), array.numel() // len(array)


def _factors(array: Tensor) -> np.dtype[np.floating]:
    """The type of the sent factors: as wide as the array's, and at least float32."""
    return np.dtype("<f8" if array.dtype == torch.float64 else "<f4")
