"""Wire format of coded broadcasts: the changes of an array since the value that a client holds.

A coded array has the name `coded/NAME`: the digest of the value to which its codes apply (32 bytes), then one
code for each broadcast since. The result is identified by its digest, like every array, so no client trains
from a value that is unknown to the server. Decoding must give the same bits everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.core import registry
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec
from fedfrozen_app.exchange.names import with_namespace

CODED = "coded"  # namespace
BEFORE = 32  # bytes of a SHA-256


def coder_of(codec: tuple[str, Any]) -> UpdateCodec:
    found: UpdateCodec = registry.find("codecs", codec[0])(codec[1])
    return found


def coded_name(name: str) -> str:
    return with_namespace(CODED, name)


def joined(before: str, codes: Sequence[Tensor]) -> Tensor:
    """The wire format of one array: the digest of the value to which the codes apply, then the codes."""
    return torch.cat([bytes_of_digest(before), *codes])


def bytes_of_digest(digest: str) -> Tensor:
    return torch.tensor([*bytes.fromhex(digest)], dtype=torch.uint8)


def digest_in(data: Tensor) -> str:
    return bytes(data.tolist()).hex()


def most_codes(coder: UpdateCodec, array: Tensor) -> int:
    """The largest number of codes that are shorter than the array itself; from shapes alone."""
    return max((array.nbytes - BEFORE - 1) // max(coder.size_of(array), 1), 0)


def coded_bytes(coder: UpdateCodec, array: Tensor, codes: int) -> int:
    return BEFORE + codes * coder.size_of(array)


def with_decoded(
    codec: tuple[str, Any] | None, base: Iterable[str], sent: Mapping[str, Tensor], cache: Cache
) -> Mapping[str, Tensor]:
    """The sent arrays of these names, including those decoded from the run's codec. An array with invalid
    bytes, or whose initial value is not held, is left out: it is requested as missing."""
    if codec is None:
        return sent
    coder, found = coder_of(codec), dict(sent)
    for name in base:
        data = found.pop(coded_name(name), None)
        if data is None or data.dtype != torch.uint8 or data.ndim != 1 or len(data) < BEFORE:
            continue
        value = cache.get(digest_in(data[:BEFORE]))
        if value is not None and (new := _changed(coder, value.cpu(), data[BEFORE:])) is not None:
            found[name] = new
    return found


def _changed(coder: UpdateCodec, value: Tensor, codes: Tensor) -> Tensor | None:
    size = coder.size_of(value)
    if not size or not len(codes) or len(codes) % size or len(codes) // size > most_codes(coder, value):
        return None
    for code in codes.split(size):
        try:
            value = coder.applied(code, value)
        except ValueError:
            return None
    return value
