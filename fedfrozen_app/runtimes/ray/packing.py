"""Pack named tensors and clients' state into one buffer that Ray moves between processes without copies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.summed import Spec

ALIGN = 16  # bytes: alignment of every array
SPEC_OF_DATA = "card"  # the record of the data spec, which every worker computes itself
RECORDS = {"config": ConfigRecord, "metrics": MetricRecord}


@dataclass(frozen=True)
class Packed:
    """The arrays' names, shapes and types, and their concatenated bytes."""

    specs: tuple[Spec, ...]
    data: np.ndarray  # uint8

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> "Packed":
        specs = tuple((name, value.shape, value.dtype) for name, value in arrays.items())
        data = torch.zeros(sum(map(_room, specs)), dtype=torch.uint8)
        start = 0
        for spec, value in zip(specs, arrays.values(), strict=True):
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            data[start : start + len(flat)].copy_(flat)
            start += _room(spec)
        return cls(specs, data.numpy())

    def unpack(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Copies of the arrays: buffers from Ray are read-only."""
        data = torch.from_numpy(np.array(self.data)).to(device)
        found, start = {}, 0
        for spec in self.specs:
            name, shape, dtype = spec
            size = shape.numel() * dtype.itemsize
            found[name] = data[start : start + size].view(dtype).reshape(shape)
            start += _room(spec)
        return found


def _room(spec: Spec) -> int:
    _, shape, dtype = spec
    return -(-shape.numel() * dtype.itemsize // ALIGN) * ALIGN


def packed_state(state: RecordDict) -> dict[str, Any]:
    """Pack a client's kept state."""
    found: dict[str, Any] = {}
    for name, record in state.items():
        if isinstance(record, ArrayRecord):
            found[name] = Packed.of(to_tensors(record))
        elif name != SPEC_OF_DATA:
            kind = "config" if isinstance(record, ConfigRecord) else "metrics"
            found[name] = (kind, dict(record))
    return found


def restore_state(state: RecordDict, packed: Mapping[str, Any]) -> None:
    """Replace a client's kept state."""
    for name in [name for name in state if name != SPEC_OF_DATA]:
        del state[name]
    for name, value in packed.items():
        if isinstance(value, Packed):
            state[name] = to_record(value.unpack(), local=True)
        else:
            kind, content = value
            state[name] = RECORDS[kind](content)
