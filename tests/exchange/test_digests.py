"""Digests: the same however they are worked out, and right when somebody asks for them."""

import hashlib

import torch

from fedfrozen_app.core.digests import PIECE, digest, digests, start_digests


def test_a_digest_is_of_type_shape_and_pieces():
    values = torch.arange(PIECE // 4 + 3, dtype=torch.float32)  # one piece, and twelve bytes of another
    raw = values.numpy().tobytes()
    pieces = [hashlib.sha256(part).digest() for part in (raw[:PIECE], raw[PIECE:])]
    whole = hashlib.sha256(f"torch.float32:({len(values)},):".encode() + b"".join(pieces))
    assert digest(values) == whole.hexdigest()


def test_those_that_were_begun_are_those_that_are_waited_for():
    generator = torch.Generator().manual_seed(0)
    arrays = {
        str(n): torch.randn(n * 30_000, generator=generator) for n in (0, 1, 4, 9, 25)
    }  # none to twelve pieces
    wait = start_digests(arrays)
    assert wait() == digests(arrays) == {name: digest(value) for name, value in arrays.items()}
    assert wait() == digests(arrays)  # whoever asks again
