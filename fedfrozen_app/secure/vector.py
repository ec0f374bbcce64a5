"""Vectors of a round, and masks on them.

A vector is a head of numbers modulo 2^64 (counts, metrics) and a body of numbers modulo 2^b (the arrays),
each in a word of at least b bits: of 8 or 16, and from b = 16 on of 32. A mask is a ChaCha20 keystream over
both: with the key it can be subtracted again; without it the masked vector is uniformly random.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

CHUNK = 1 << 18  # bytes: keystream and target fit in a core's cache
ZEROS = bytes(CHUNK)
WORD, WIDE = np.dtype("<u4"), np.dtype("<u8")
BYTE, HALF = np.dtype("u1"), np.dtype("<u2")


def word_of(bits: int) -> np.dtype:
    """The data type of a number in the body."""
    return BYTE if bits <= 8 else HALF if bits < 16 else WORD


def signed_word(word: np.dtype) -> np.dtype:
    return np.dtype(f"<i{word.itemsize}")


@dataclass
class Vector:
    head: np.ndarray  # uint64
    body: np.ndarray  # of `word_of(bits)`

    @classmethod
    def zeros(cls, head: int, body: int, bits: int = 32) -> Self:
        return cls(np.zeros(head, WIDE), np.zeros(body, word_of(bits)))

    def add(self, other: "Vector") -> None:
        self.head += other.head
        self.body += other.body

    def mask(self, key: bytes, *, subtract: bool = False) -> None:
        """Add this key's keystream, or subtract it; a key is for one vector only."""
        stream = _Stream(key)
        change = np.subtract if subtract else np.add
        for part in (self.head, self.body):
            size = CHUNK // part.itemsize
            for start in range(0, len(part), size):
                piece = part[start : start + size]
                change(piece, stream.numbers(len(piece), part.dtype), out=piece)

    def packed(self, bits: int) -> np.ndarray:
        """The bytes to send: the lowest `bits` of every number of the body, which are all that the sum
        needs."""
        low = self.body.view(np.uint8)
        if bits == 12:
            low = _pairs(self.body)
        elif 8 < bits < 32:
            low = low.reshape(-1, WORD.itemsize)[:, : bits // 8].reshape(-1)
        return np.concatenate([self.head.view(np.uint8), low])


def packed_size(head: int, body: int, bits: int) -> int:
    return head * WIDE.itemsize + -(-body * bits // 8)


def _pairs(body: np.ndarray) -> np.ndarray:
    """Two numbers of 12 bits in three bytes."""
    even = np.zeros(len(body) + len(body) % 2, HALF)
    even[: len(body)] = body & 0xFFF
    first, second = even[::2], even[1::2]
    joined = np.stack([first & 0xFF, first >> 8 | (second & 15) << 4, second >> 4], axis=1)
    return joined.astype(np.uint8).reshape(-1)[: packed_size(0, len(body), 12)]


def _unpaired(low: np.ndarray) -> np.ndarray:
    count = len(low) * 8 // 12
    filled = np.zeros(-(-len(low) // 3) * 3, HALF)
    filled[: len(low)] = low
    one, two, three = filled.reshape(-1, 3).T
    return np.stack([one | (two & 15) << 8, two >> 4 | three << 4], axis=1).reshape(-1)[:count]


def unpacked(data: bytes | np.ndarray, head: int, bits: int) -> Vector:
    """The inverse of `packed`, for data of the right length."""
    raw = np.frombuffer(data, np.uint8)
    split = head * WIDE.itemsize
    front = raw[:split].view(WIDE) if raw.ctypes.data % WIDE.itemsize == 0 else raw[:split].copy().view(WIDE)
    if bits in (8, 32):
        return Vector(front, np.frombuffer(raw[split:].data, word_of(bits)))
    if bits == 12:
        return Vector(front, _unpaired(raw[split:]))
    low = raw[split:].reshape(-1, bits // 8)
    wide = np.zeros((len(low), WORD.itemsize), np.uint8)
    wide[:, : bits // 8] = low
    return Vector(front, wide.reshape(-1).view(WORD))


def signed(vector: Vector, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(head, body) as signed integers."""
    word = vector.body.dtype
    whole, shift = signed_word(word), 8 * word.itemsize - bits
    body = (vector.body << word.type(shift)).view(whole) >> whole.type(shift)
    return vector.head.view(np.dtype("<i8")), body


@dataclass
class _Stream:
    key: bytes
    _room: bytearray = field(default_factory=lambda: bytearray(CHUNK))

    def __post_init__(self) -> None:
        # Counter and nonce may be 0: the key is used for this stream alone.
        self._cipher = Cipher(ChaCha20(self.key, bytes(16)), mode=None).encryptor()

    def numbers(self, count: int, dtype: np.dtype) -> np.ndarray:
        size = count * dtype.itemsize
        zeros = ZEROS if size == CHUNK else memoryview(ZEROS)[:size]
        self._cipher.update_into(zeros, self._room)
        return np.frombuffer(self._room, dtype, count)
