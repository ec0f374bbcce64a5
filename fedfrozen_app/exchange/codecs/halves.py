"""Updates in two bytes per value, rounded to the nearest."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec


class Halves(UpdateCodec):
    dtype: ClassVar[torch.dtype]

    def size(self, count: int, itemsize: int) -> int:
        return 2 * count

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        return update.to(self.dtype).view(torch.uint8).numpy()

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        # A copy: the bytes of a message may not be aligned.
        return torch.from_numpy(data.copy()).view(self.dtype).to(dtype)


class Float16(Halves):
    """Eleven significant bits; changes below 3·10⁻⁸ become zero, and those above 65,504 cannot be sent."""

    dtype = torch.float16


class BFloat16(Halves):
    """Eight significant bits, and the range of float32."""

    dtype = torch.bfloat16
