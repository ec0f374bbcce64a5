"""Cryptographically secure random numbers: the keystream of AES-256 in counter mode.

The key is 256 bits of the operating system, drawn once for every stream, so no two streams share anything.
`cryptography` (OpenSSL) encrypts; this module only converts its bytes to numbers.

Gaussians come from the Box-Muller transform, in float64. The last digits of one could reveal it: only some
floating-point numbers are ever drawn (Mironov 2012, arXiv 2112.05307). So each is the sum of four independent
ones, divided by two, as in Opacus' secure mode: undoing that takes 2^159 tries (Holohan and Braghin 2021,
arXiv 2107.10138, section 5.1).
"""

import math
import os
import secrets
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from itertools import islice

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

from fedfrozen_app.vmap.load_gpu_kernels import gpu_kernels_on

TERMS = 4
CHUNK = 1 << 16  # Gaussians computed at once: their arrays stay in a processor's cache
# On a GPU a launch costs more than its work, and host memory must be bounded. A little below a power of two,
# to which torch rounds pinned memory, to leave space for SPARE and for lengths that are rounded up.
GPU_CHUNK = (1 << 22) - (1 << 10)
AHEAD = 2  # chunks that are encrypted concurrently, so that no thread waits for the slowest of one
# The plaintext, reused for every piece: fresh memory costs as much as AES. Large pieces, because a thread
# waits for the GIL after each.
ZEROS = memoryview(bytes(1 << 23))
FRACTION = 53  # bits of a float64
SPARE = 2  # extra words at the end: OpenSSL requires a block less one byte
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
        """`count` integers of 64 bits."""
        buffer = np.empty(count + SPARE, dtype=np.uint64)
        self.encipher(buffer.view(np.uint8).data, 8 * count)
        return buffer[:count]

    def encipher(self, buffer: memoryview, size: int) -> None:
        """Write `size` bytes into the buffer, which is SPARE words longer."""
        if self._forks != _forks:  # a copy of the parent's stream would repeat the parent's numbers
            self._begin()
        for start in range(0, size, len(ZEROS)):
            self._cipher.update_into(ZEROS[: min(len(ZEROS), size - start)], buffer[start:])

    def uniform(self, count: int) -> np.ndarray:
        """Multiples of 2⁻⁵³ in [0, 1), each equally likely."""
        return (self.words(count) >> np.uint64(64 - FRACTION)) * 2.0**-FRACTION

    def below(self, size: int) -> int:
        """A uniform integer in [0, size), by rejection sampling."""
        bits = (size - 1).bit_length()
        while True:
            drawn = int(self.words(1)[0]) >> (64 - bits)
            if drawn < size:
                return drawn

    def gaussians(self, count: int, device: torch.device) -> Tensor:
        """(count,) in float64, independent, with mean 0 and variance 1."""
        return gaussians_of([self], count, device)[0]


def gaussians_of(
    streams: Sequence[Keystream], count: int, device: torch.device, workers: Executor | None = None
) -> Tensor:
    """`Keystream.gaussians` of several streams, (streams, count). `workers` encrypt concurrently: the cipher
    releases the GIL."""
    found = torch.empty(len(streams), count, dtype=torch.float64, device=device)
    at_once = GPU_CHUNK if device.type == "cuda" else CHUNK
    parts = found.split(-(-at_once // len(streams)), dim=1)
    counts = [2 * TERMS * ((part.shape[1] + 1) // 2) for part in parts]
    kernels = gpu_kernels_on(device, "privacy.gpu_kernels")
    with closing(_words_on(device, streams, counts, workers)) as drawn:
        for part, words in zip(parts, drawn, strict=True):
            if kernels is None:
                part.copy_(_worked_out(words)[:, : part.shape[1]])
            else:
                kernels.gaussians(words, part, TERMS)
    return found


def _words_on(
    device: torch.device, streams: Sequence[Keystream], counts: Sequence[int], workers: Executor | None
) -> Generator[Tensor]:
    """Yield (streams, count) words as signed integers for each count; for a GPU from pinned memory, for
    asynchronous copies. `workers` encrypt the next while one is copied and used."""
    on_gpu = device.type == "cuda"
    used: deque[torch.cuda.Event] = deque(maxlen=2)
    before: dict[int, Future[None]] = {}

    def fill(number: int, buffer: Tensor, count: int, after: Future[None] | None) -> None:
        if after is not None:  # a cipher serves one thread at a time, and chunks in their order
            after.result()
        streams[number].encipher(buffer[number].numpy().view(np.uint8).data, 8 * count)

    def begin(count: int) -> tuple[Tensor, list[Future[None]]]:
        if len(used) == 2:  # AHEAD + 2 buffers are pinned: the oldest is free once it is copied
            used[0].synchronize()
        buffer = torch.empty(len(streams), count + SPARE, dtype=torch.int64, pin_memory=on_gpu)
        for number in range(len(streams)):
            if workers is None:
                fill(number, buffer, count, None)
            else:
                before[number] = workers.submit(fill, number, buffer, count, before.get(number))
        return buffer, list(before.values())

    left = iter(counts)
    coming = deque(map(begin, islice(left, 0 if workers is None else AHEAD - 1)))
    try:
        for _ in counts:
            coming.extend(map(begin, islice(left, 1)))
            buffer, filled = coming.popleft()
            for job in filled:
                job.result()
            yield buffer.to(device, non_blocking=True)[:, :-SPARE]
            if on_gpu:
                used.append(torch.cuda.current_stream(device).record_event())
    finally:  # no cipher may still run afterwards, even after an error
        wait(before.values())


def _worked_out(words: Tensor) -> Tensor:
    """(streams, words) -> (streams, words / TERMS) Gaussians."""
    # Shifted as signed numbers, so that the sign fills the upper bits: these are cut off.
    drawn = words.bitwise_right_shift_(64 - FRACTION).bitwise_and_((1 << FRACTION) - 1).double()
    drawn = drawn.view(len(words), 2, TERMS, -1)
    # u in (0, 1], or its logarithm would not be finite.
    radius = (drawn[:, 0] + 1).mul_(2.0**-FRACTION).log_().mul_(-2.0).sqrt_()
    angle = drawn[:, 1].mul_(2 * math.pi * 2.0**-FRACTION)
    pairs = torch.stack([angle.cos(), angle.sin_()], dim=1).mul_(radius.unsqueeze(1))  # all independent
    return pairs.sum(dim=2).div_(math.sqrt(TERMS)).flatten(1)
