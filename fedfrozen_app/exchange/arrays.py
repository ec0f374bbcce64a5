"""Tensors as Flower arrays, on the wire and without a wire, and their digests.

Flower carries every array of a message by requests of its own, several for each, at every station on the way:
for a model of a hundred small arrays they take longer than the training. So all arrays of a message travel as
one, in the safetensors format. Flower's own `Array(tensor)` goes through `np.save`: no bfloat16.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

RAW = "raw"
PACKED = "safetensors"  # the name and the type of the one array that holds all
PIECE = 2**18  # bytes that one thread hashes at a time; part of what a digest is
DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.uint8)
}


def raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def digest(tensor: Tensor) -> str:
    """SHA-256 of an array's dtype, shape and the digests of its bytes, piece by piece."""
    (found,) = digests({"": tensor}).values()
    return found


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By name; large ones on threads, because hashing is most of what a large model costs the server."""
    pieces = {name: _pieces(data) for name, data in _bytes_of(tensors).items()}
    jobs = {n: [_pool().submit(_hash, piece) for piece in own] for n, own in pieces.items() if len(own) > 1}
    # The small ones here meanwhile: handing them over would take longer.
    here = {name: list(map(_hash, own)) for name, own in pieces.items() if name not in jobs}
    hashes = here | {name: [job.result() for job in own] for name, own in jobs.items()}
    return {name: _digest_of(tensor, hashes[name]) for name, tensor in tensors.items()}


def _bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host, as bytes: views where they are there already; from a GPU all in one copy."""
    flat = {name: t.detach().contiguous().reshape(-1).view(torch.uint8) for name, t in tensors.items()}
    if not any(data.is_cuda for data in flat.values()):
        return flat
    together = torch.cat(list(flat.values()))
    here = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True).copy_(together)
    return dict(zip(flat, here.split([len(data) for data in flat.values()]), strict=True))


def _digest_of(tensor: Tensor, hashes: Iterable[bytes]) -> str:
    found = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)}:".encode())
    for each in hashes:
        found.update(each)
    return found.hexdigest()


def _pieces(data: Tensor) -> list[memoryview]:
    view = data.numpy().data
    return [view[start : start + PIECE] for start in range(0, len(view), PIECE)]


def _hash(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="digest")


class LocalArray(Array):
    """An array that never leaves the process: the tensor itself, turned into bytes only if somebody asks.

    Insert it by item assignment: building `ArrayRecord({...})` would ask at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Array is a dataclass whose fields are plain attributes; `data` is the lazy one below.
        self.__dict__.update(
            tensor=tensor,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype=RAW,
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return raw_bytes(self.__dict__["tensor"])


def to_record(tensors: Mapping[str, Tensor], *, local: bool) -> ArrayRecord:
    """Named tensors for a message: `local` ones travel by reference, others packed into one array."""
    record = ArrayRecord()
    if local:
        for name, tensor in tensors.items():
            record[name] = LocalArray(tensor)
    elif tensors:
        # Numbered, because the format has an order of its own.
        named = {f"{number} {name}": tensor for number, (name, tensor) in enumerate(tensors.items())}
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})
        record[PACKED] = Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)
    return record


def to_tensor(array: Array) -> Tensor:
    """The tensor of an array; `ValueError` with a reason when it is not what it says."""
    if isinstance(array, LocalArray):
        return array.__dict__["tensor"]
    dtype = DTYPES.get(array.dtype)
    if array.stype != RAW or dtype is None:
        raise ValueError(f"has the unknown type {array.stype}/{array.dtype}")
    count = math.prod(array.shape)
    if min(array.shape, default=0) < 0 or len(array.data) != count * dtype.itemsize:
        raise ValueError(f"has {len(array.data)} bytes for the shape {tuple(array.shape)}")
    if count == 0:
        return torch.empty(0, dtype=dtype).reshape(array.shape)
    # The copy makes it writable: the server turns a reply into an update in place.
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """The named tensors again; `ValueError` with a reason, as the rest of a sentence, where they are none."""
    if PACKED in record:
        return _unpack(record[PACKED])
    found = {}
    for name, array in record.items():
        try:
            found[name] = to_tensor(array)
        except ValueError as error:
            raise ValueError(f"sent the array {name}, which {error}") from error
    return found


def _unpack(array: Array) -> dict[str, Tensor]:
    try:
        named = {(int(key.partition(" ")[0]), key): tensor for key, tensor in load(array.data).items()}
        found = {key.partition(" ")[2]: named[number, key] for number, key in sorted(named)}
    except (SafetensorError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise ValueError(f"sent arrays that cannot be read ({error})") from error
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"sent the array {name}, which has the unknown type {tensor.dtype}")
    return found
