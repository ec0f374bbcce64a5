"""Random numbers that nobody can work out from others: the keystream of AES-256 in counter mode.

The key is 256 bits of the operating system, drawn once for every stream, so no two streams share anything.
`cryptography` (OpenSSL) does the enciphering; here its bytes only become numbers.

Gaussians come by Box and Muller's formula, in float64. One of them can be told from its last digits: only
some floating-point numbers are ever drawn (Mironov 2012, arXiv 2112.05307). So each is the sum of four
independent ones, divided by two, as in Opacus' secure mode: whoever would undo that tries 2^159 sums (Holohan
and Braghin 2021, arXiv 2107.10138, section 5.1).
"""

import math
import os
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

TERMS = 4
CHUNK = 1 << 16  # Gaussians worked out at once: their arrays stay in a processor's cache
GPU_CHUNK = 1 << 20  # there a launch costs more than its work, and host memory must be bounded
ZEROS = memoryview(bytes(1 << 20))  # what is enciphered, piece by piece: fresh memory costs as much as AES
FRACTION = 53  # bits of a float64
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Keystream:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._forks = _forks
        # The counter may start at 0: the key is used for this stream alone.
        self._cipher: CipherContext = Cipher(AES256(secrets.token_bytes(32)), CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """So many whole numbers of 64 bits."""
        room = np.empty(count + 2, dtype=np.uint64)  # OpenSSL wants a block less one byte to spare
        self._encipher(room.view(np.uint8).data, 8 * count)
        return room[:count]

    def _encipher(self, room: memoryview, size: int) -> None:
        if self._forks != _forks:  # a copy of the parent's stream would say what the parent says
            self._begin()
        for start in range(0, size, len(ZEROS)):
            self._cipher.update_into(ZEROS[: min(len(ZEROS), size - start)], room[start:])

    def _words_on(self, device: torch.device, count: int) -> Tensor:
        """The same as signed numbers on a device: from pinned memory, which a GPU reads by itself."""
        if device.type != "cuda":
            return torch.from_numpy(self.words(count).view(np.int64))
        room = torch.empty(8 * count + 16, dtype=torch.uint8, pin_memory=True)
        self._encipher(room.numpy().data, 8 * count)
        return room[: 8 * count].view(torch.int64).to(device, non_blocking=True)

    def uniform(self, count: int) -> np.ndarray:
        """Multiples of 2⁻⁵³ in [0, 1), each equally likely."""
        return (self.words(count) >> np.uint64(64 - FRACTION)) * 2.0**-FRACTION

    def below(self, size: int) -> int:
        """A whole number in [0, size), each equally likely: what is too large is drawn again."""
        bits = (size - 1).bit_length()
        while True:
            drawn = int(self.words(1)[0]) >> (64 - bits)
            if drawn < size:
                return drawn

    def gaussians(self, count: int, device: torch.device) -> Tensor:
        """(count,) in float64, independent, with mean 0 and variance 1."""
        found = torch.empty(count, dtype=torch.float64, device=device)
        for part in found.split(GPU_CHUNK if device.type == "cuda" else CHUNK):
            part.copy_(self._gaussians(len(part), device))
        return found

    def _gaussians(self, count: int, device: torch.device) -> Tensor:
        half = (count + 1) // 2
        words = self._words_on(device, 2 * TERMS * half)
        # Shifted as signed numbers, so that the sign fills the upper bits: these are cut off.
        drawn = words.bitwise_right_shift_(64 - FRACTION).bitwise_and_((1 << FRACTION) - 1).double()
        drawn = drawn.view(2, TERMS, half)
        # u in (0, 1], or its logarithm would not be finite.
        radius = (drawn[0] + 1).mul_(2.0**-FRACTION).log_().mul_(-2.0).sqrt_()
        angle = drawn[1].mul_(2 * math.pi * 2.0**-FRACTION)
        pairs = torch.stack([angle.cos(), angle.sin_()]).mul_(radius)  # (2, TERMS, half): all independent
        return pairs.sum(dim=1).div_(math.sqrt(TERMS)).view(-1)[:count]
