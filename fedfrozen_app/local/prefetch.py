"""A round that the cohort runner starts before its train request arrives, while the server closes the
previous round. If another request arrives, the prefetched work is dropped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.round_work import RoundWork
from fedfrozen_app.local.slots import Schedule

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


@dataclass
class PrefetchedRound:
    """A round's work that has started before its request arrived."""

    work: RoundWork  # of the expected request, without digests that were not known yet
    blocks: Iterator[Block]
    versions: Sequence[int]  # of the arrays in its base, when they were read

    def serves(self, clients: Sequence[str], request: TrainRequest, base: Mapping[str, Tensor]) -> bool:
        """Whether this work is what the request asks of these clients."""
        work = self.work
        if list(clients) != list(work.clients) or without_base(request) != without_base(work.request):
            return False
        if base.keys() != work.base.keys() or versions_of(work.base) != self.versions:
            return False
        # Arrays in the request are the expected objects. Arrays that clients already held may be copies.
        other = [name for name, array in base.items() if array is not work.base[name]]
        other = [name for name in other if work.request.base.get(name) != request.base[name]]
        return all(same_bits(base[name], work.base[name]) for name in other)


@dataclass
class Ahead:
    """Work prepared for the next round of a run."""

    schedule: tuple[Any, Schedule] | None = None  # key of the work, and its batches
    prefetched: PrefetchedRound | None = None


def ahead_of(worker: "Worker") -> Ahead:
    return worker.kept.for_run(Ahead)


def drop_prefetched(worker: "Worker") -> None:
    """Drop prefetched work that will not be requested, such as after an early stop."""
    ahead_of(worker).prefetched = None


def without_base(request: TrainRequest) -> str:
    """A request's text without the values of its base."""
    return replace(request, base={}).json


def versions_of(arrays: Mapping[str, Tensor]) -> list[int]:
    """Torch's version counters, which count in-place changes."""
    return [array._version for array in arrays.values()]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal: zeros of both signs are equal numbers with different bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(array.to(one.device).reshape(-1).view(torch.uint8) for array in (one, other)))
