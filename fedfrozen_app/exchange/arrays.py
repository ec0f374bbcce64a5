"""Tensors as Flower arrays: bytes between processes, references within one.

Flower transfers every array of a message by separate requests, several per array and hop: for a model of a
hundred small arrays they take longer than the training. So all arrays of a message are sent as one, in the
safetensors format. Flower's own `Array(tensor)` uses `np.save`, which has no bfloat16.
"""

import math
from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedfrozen_app.core.digests import raw_bytes

RAW = "raw"
PACKED = "safetensors"  # the name and the type of the array that holds all others
DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.uint8)
}


class LocalArray(Array):
    """An array that never leaves the process: the tensor itself, converted to bytes only if they are read.

    Insert it by item assignment: building `ArrayRecord({...})` would read the bytes at once.
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
    """Named tensors for a message: by reference if `local`, otherwise packed into one array."""
    record = ArrayRecord()
    if local:
        for name, tensor in tensors.items():
            record[name] = LocalArray(tensor)
    elif tensors:
        # Numbered, because safetensors does not preserve the order.
        named = {f"{number} {name}": tensor for number, (name, tensor) in enumerate(tensors.items())}
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})
        record[PACKED] = Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)
    return record


def to_tensor(array: Array) -> Tensor:
    """The tensor of an array; `ValueError` with a reason if its bytes do not fit its type and shape."""
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
    # A copy, to be writable: the server turns replies into updates in place.
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """The named tensors of a record; `ValueError`, as the rest of a sentence, if one cannot be read."""
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
