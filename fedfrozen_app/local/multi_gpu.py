"""The clients of a round over several GPUs of one machine (`runtime.gpus`), each with its own model and data.

Clients are assigned longest first, each to the GPU with the least work. Every GPU has a cohort runner, driven
by a thread of its own. Finished blocks move to the first GPU, where the server adds them up. Their order does
not depend on the speed of the threads, so that a run can be repeated.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.slots import batch_counts

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def deal(counts: Sequence[int], lanes: int) -> list[list[int]]:
    """Places of clients with `counts` batches, by lane: longest first, each where the least work is."""
    found: list[list[int]] = [[] for _ in range(lanes)]
    load = [(0, lane) for lane in range(lanes)]
    for place in sorted(range(len(counts)), key=lambda place: -counts[place]):
        work, lane = heapq.heappop(load)
        found[lane].append(place)
        heapq.heappush(load, (work + counts[place], lane))
    return [sorted(places) for places in found]


class Lane:
    """One GPU: its runner, and the thread that drives it."""

    def __init__(self, worker: "Worker", typical: Sequence[str]) -> None:
        self.device = worker.device
        self.runner = CohortRunner(worker, typical or None)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        def use() -> None:  # a thread begins with the first GPU
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)

        return ThreadPoolExecutor(1, thread_name_prefix=str(self.device), initializer=use)

    def there(self) -> AbstractContextManager[None]:
        """Within it this GPU is the one that torch asks for memory and records on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def ahead(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """The blocks: the thread trains the next one while this one is read. It begins at once."""
        coming = self._thread.submit(next, blocks, None)

        def read() -> Iterator[Block]:
            nonlocal coming
            while (block := coming.result()) is not None:
                coming = self._thread.submit(next, blocks, None)
                yield block

        return read()


class SpreadRunner(CohortRunner):
    """A cohort runner whose clients train on the GPU of `worker` and on those of `others`."""

    def __init__(
        self, worker: "Worker", others: Sequence["Worker"], typical: Sequence[str] | None = None
    ) -> None:
        super().__init__(worker, typical)
        self._workers = [worker, *others]
        self._lanes: list[Lane] = []
        for each in self._workers:
            each.alone = False

    def completion_order(self, clients: Sequence[str], request: TrainRequest) -> list[list[str]]:
        blocks = []
        for lane, own in self._assigned(clients, request):
            with lane.there():
                blocks.append(lane.runner.completion_order(own, request))
        return [block for row in zip_longest(*blocks) for block in row if block is not None]

    def lay_out_ahead(self, clients: Sequence[str], request: TrainRequest) -> None:
        """Nothing is laid out ahead: clients are assigned to GPUs when the request comes."""

    def train(
        self,
        clients: Sequence[str],
        request: TrainRequest,
        base: Mapping[str, Tensor],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> Iterator[Block]:
        works = []
        # One after another: the first decides for all whether steps are compiled.
        for lane, own in self._assigned(clients, request):
            mine = {client: on(kept.get(client, {}), lane.device) for client in own}
            with lane.there():
                works.append((lane, lane.runner.prepare(own, request, on(base, lane.device), mine)))
        ways = [lane.ahead(lane.runner.blocks_of(work)) for lane, work in works]
        for row in zip_longest(*ways):
            yield from (self._here(block) for block in row if block is not None)

    def _assigned(self, clients: Sequence[str], request: TrainRequest) -> list[tuple[Lane, list[str]]]:
        """Which clients train on which GPU; GPUs without clients are left out."""
        for other in self._workers[1:]:
            if other.config is not self.worker.config:  # a sweep has started its next run
                other.switch_to(self.worker.config, self.worker.shares)
            other.kept.share_for_run(self.worker.kept.for_run(Compiling))
        if not self._lanes:
            first = self._parts(self._typical or clients, request)
            self._lanes = [Lane(each, own) for each, own in zip(self._workers, first, strict=True)]
        parts = self._parts(clients, request)
        return [(lane, own) for lane, own in zip(self._lanes, parts, strict=True) if own]

    def _parts(self, clients: Sequence[str], request: TrainRequest) -> list[list[str]]:
        counts = batch_counts(self.worker.data, clients, request.plan, request.most_steps)
        return [[clients[place] for place in places] for places in deal(counts, len(self._workers))]

    def _here(self, block: Block) -> Block:
        device = self.worker.device
        return replace(
            block,
            base=block.base.to(device),
            values=block.values.to(device),
            metrics=on(block.metrics, device),
            kept=[on(arrays, device) for arrays in block.kept],
        )


def on(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in arrays.items()}
