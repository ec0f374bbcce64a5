"""A client's privacy budget: a record of what it has spent, on its own disk, written before anything leaves.

    CLIENT.json          the steps paid for, the noise solved for this client, and the layers last chosen
    CLIENT.safetensors   the newest reply: to the same request the client sends it again, at no cost
    CLIENT.jsonl         its losses and attention scores, which stay here

A step is charged before it is taken: a client that dies half way has paid, and pays again for a repeated
request.
"""

import fcntl
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedfrozen_app.core.digests import bytes_on_their_way
from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.disk import append_line, patient
from fedfrozen_app.files.seal import SEAL, sealed, unsealed
from fedfrozen_app.privacy.steps import Steps

log = logging.getLogger(__name__)
FORMAT = 1
PRIVATE = 0o700  # the folder's mode: it may hold losses and an audit's noise
CHECKSUM = "crc32"
WHOLE = "arrays"  # the name of a reply's one array, and of its description in the header


@dataclass
class Budget:
    """`declared` is the number of examples (or documents, patients) that this client declares to others."""

    client: str
    unit: str
    delta: float
    declared: int
    noise: float  # noise multiplier of a training step
    selection_noise: float | None = None  # of a choice of layers; None if that is not noised
    rounds: int = 0  # that this client has taken part in
    steps: list[Steps] = field(default_factory=list)  # paid for
    layers: list[int] | None = None  # chosen last
    last_order: str | None = None  # the digest of the request that was last paid for
    seeded: bool = False  # some noise came from a known seed: nothing here is private


@dataclass(frozen=True)
class Declined:
    """The only reply of a client that may send nothing else."""

    reason: str  # completes a sentence


class BudgetFile:
    def __init__(self, folder: Path, client: str) -> None:
        self._path = folder / f"{client}.json"
        self._reply = folder / f"{client}.safetensors"
        self._log = folder / f"{client}.jsonl"
        self._lock: TextIO | None = None
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the record from reading to sending: concurrent runs would overwrite each other's entries."""
        with self._path.with_suffix(".lock").open("w") as self._lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            yield

    def read(self) -> Budget | None:
        """The last record; None before the first round. A damaged file is an error, never a fresh start."""
        try:
            data = json.loads(self._path.read_text("utf-8"))
            if SEAL in data:  # records of older versions have none
                data = unsealed(self._path)
            steps = [Steps(float(noise), float(rate), int(times)) for noise, rate, times in data.pop("steps")]
            if data.pop("format") != FORMAT:
                raise ValueError("its format is another version's")
            return Budget(steps=steps, **data)
        except FileNotFoundError:
            return None
        except DAMAGED as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"The privacy record {self._path} cannot be read ({why}), so what was spent is unknown: "
                "put it back from a copy, or remove it if the data may be spent from again."
            ) from error

    @patient
    def write(self, budget: Budget) -> None:
        """Write the record to the disk atomically."""
        part = self._path.with_suffix(".part")
        with part.open("w") as file:
            file.write(sealed({"format": FORMAT, **asdict(budget)}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def keeping(
        self, request: str, arrays: Mapping[str, Tensor], metrics: Mapping[str, Any], *, apart: bool = False
    ) -> Callable[[], None]:
        """Returns a function that stores this reply and metrics that stay here. The lock of `alone` is held
        until it has run, even after the block. `apart`: copy the arrays, because they may change before
        that."""
        # As one array: reading many arrays would take longer than the disk itself.
        kinds = [
            (name, str(value.dtype).removeprefix("torch."), list(value.shape))
            for name, value in arrays.items()
        ]
        description = {"order": request, WHOLE: json.dumps(kinds)}
        if apart and not any(value.is_cuda for value in arrays.values()):  # those are copied anyway
            arrays = {name: value.clone() for name, value in arrays.items()}
        coming = bytes_on_their_way(arrays)
        lock: AbstractContextManager[Any] = nullcontext()
        if self._lock is not None:  # released with the last copy of the file handle
            lock = os.fdopen(os.dup(self._lock.fileno()))

        def keep() -> None:
            with lock:
                self.note(metrics)
                parts = [each.numpy() for each in coming().values()]
                self._keep(parts, {**description, CHECKSUM: checksum(parts)})

        return keep

    @patient
    def _keep(self, parts: Sequence[np.ndarray], header: Mapping[str, str]) -> None:
        part = self._reply.with_suffix(".part2")
        _write_as_one(part, parts, header)
        # Replacing an existing file would flush the new one first, which takes as long as a step. A client
        # that dies in between has paid without a reply, as if it had died a moment earlier.
        self._reply.unlink(missing_ok=True)
        part.rename(self._reply)

    def kept_reply(self, request: str) -> dict[str, Tensor] | None:
        """The reply to this request, if it was the last one given."""
        budget = self.read()
        if budget is None or budget.last_order != request:
            return None
        if not self._reply.exists():
            log.warning("The reply %s is missing: the round is trained again.", self._reply)
            return None
        try:
            with safe_open(self._reply, "pt") as file:
                header = file.metadata() or {}
                if header.get("order") != request:
                    return None
                if WHOLE not in header:  # an older format: array by array
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                whole = file.get_tensor(WHOLE)
                if header.get(CHECKSUM, found := checksum([whole.numpy()])) != found:
                    raise ValueError("it is not as it was written")
                return _parted(whole, json.loads(header[WHOLE]))
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("The reply %s cannot be read (%s): the round is trained again.", self._reply, error)
            return None

    def note(self, metrics: Mapping[str, Any]) -> None:
        append_line(self._log, json.dumps(dict(metrics)))


def checksum(parts: Sequence[np.ndarray]) -> str:
    """The CRC-32 of these arrays' bytes: a private step should not wait for a cryptographic digest."""
    found = 0
    for part in parts:
        found = zlib.crc32(part.reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _write_as_one(path: Path, parts: Sequence[np.ndarray], header: Mapping[str, str]) -> None:
    """Write a safetensors file with the one array WHOLE. The library's writer copies everything twice and
    holds the GIL, which blocks other clients."""
    size = sum(part.nbytes for part in parts)
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    head = json.dumps({"__metadata__": dict(header), WHOLE: entry}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in parts:
            file.write(part.data)


def _parted(whole: Tensor, kinds: Sequence[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """Split the bytes of a reply into arrays with these names, types and shapes."""
    found, start = {}, 0
    for name, kind, shape in kinds:
        dtype = getattr(torch, kind)
        end = start + math.prod(shape) * dtype.itemsize
        found[name] = whole[start:end].clone().view(dtype).view(shape)  # a copy, aligned for its type
        start = end
    return found


def carry_budgets(source: Path, target: Path) -> None:
    """Copy the records of an earlier run: a run that starts from its model starts with its clients'
    spending."""
    target.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if not (target / path.name).exists():
            shutil.copy2(path, target / path.name)
