"""The cohort runner: train a round's clients together, as many at once as is fastest and fits into memory.

A client with fewer batches than the others leaves its slot after its own last step, and the next client takes
it (local/slots.py). The step that all slots share is local/step.py.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.seeds import seed_for, seeded
from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.names import parameters_in
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local import cohort_evaluation
from fedfrozen_app.local.block_results import finish_block, with_finished
from fedfrozen_app.local.client_starts import ClientStarts
from fedfrozen_app.local.compiling import Compiling, wished
from fedfrozen_app.local.layouts import Layouts, loaded_row
from fedfrozen_app.local.prefetch import PrefetchedRound, ahead_of, versions_of
from fedfrozen_app.local.round_work import RoundWork, Trained, enter
from fedfrozen_app.local.slot_memory import fitting_clients
from fedfrozen_app.local.slots import Schedule, SlotAssignment, batch_counts, cheapest_size, lay_out
from fedfrozen_app.local.step import Step
from fedfrozen_app.vmap.model_modes import training

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)
AHEAD_ON = ("cuda",)  # where a round is prefetched
# Longer blocks are not prefetched: a GPU with a thousand queued operations makes the host wait, and compared
# to that many steps the host's work between two rounds is short.
MOST_AHEAD = 256


def cannot_serve(request: TrainRequest) -> str | None:
    """Why this request needs the sequential runner; None when the cohort runner can serve it."""
    if not set(request.plan.trained) <= {*request.plan.shared, *request.plan.private}:
        return "they train something that they neither share nor keep"
    if request.choice is not None:
        return "each of them chooses its own layers"
    if request.masking is not None:
        return "each of them masks what it sends"
    return None


class CohortRunner:
    """Trains the clients of one run. `typical`: the clients from which the number of slots is chosen, so that
    a resumed run takes the same steps as an uninterrupted one. None: those of the first round."""

    def __init__(self, worker: "Worker", typical: Sequence[str] | None = None) -> None:
        self.worker = worker
        self._typical = typical
        self._steps: dict[Any, Step] = {}
        self._slots: int | None = None
        self._plan: Plan | None = None
        self._laid: tuple[Any, Layouts] | None = None  # for requests of this kind
        self._side_stream: torch.cuda.Stream | None = None  # trains one block while another is evaluated
        # Before the first step needs these GPU kernels.
        worker.per_client_kernels.begin(traced=wished(worker.config) == "true")

    def completion_order(self, clients: Sequence[str], request: TrainRequest) -> list[list[str]]:
        """The clients in the order in which they will finish, grouped by block."""
        assignments, room = self._schedule(clients, request).assignments, self._room(clients, request)
        ready = [clients[one.client] for one in assignments]
        return [ready[first : first + room] for first in range(0, len(ready), room)]

    def train(
        self,
        clients: Sequence[str],
        request: TrainRequest,
        base: Mapping[str, Tensor],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> Iterator[Block]:
        """Train the clients; they finish in blocks, in `completion_order`.

        `base`: the arrays from the request or already held; `kept`: each client's own arrays. A block has at
        most as many clients as there are slots, so that memory does not grow with the cohort.
        """
        ahead = ahead_of(self.worker)
        prefetched, ahead.prefetched = ahead.prefetched, None
        if prefetched is not None and prefetched.serves(clients, request, base):
            ahead.schedule = None  # as `prepare` does
            return prefetched.blocks
        del prefetched  # it was for another request: free its memory
        return self.blocks_of(self.prepare(clients, request, base, kept))

    def blocks_of(self, work: RoundWork) -> Iterator[Block]:
        ahead = self._may_run_ahead(work.request)
        yield from self._blocks(work, self._ahead(work) if ahead else self._trained(work))

    def prepare(
        self,
        clients: Sequence[str],
        request: TrainRequest,
        base: Mapping[str, Tensor],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> RoundWork:
        """Load the round's model and lay out which client trains when; nothing is trained yet."""
        worker = self.worker
        worker.load_merged_deltas(base)
        worker.load(parameters_in(base), request.base)
        layouts, slots = self._layouts(request), self._room(clients, request)
        schedule = self._schedule(clients, request)
        ahead_of(worker).schedule = None  # otherwise both it and the next one are in memory
        start = loaded_row(worker.parameters, layouts.trained)
        own = [kept.get(client, {}) for client in clients]
        before = cohort_evaluation.evaluate_before(worker, clients, request, own)
        starts = ClientStarts(layouts, request, start, own)
        if before and request.plan.private:  # the evaluation has loaded clients' own models
            worker.load(starts.common, {})
        steps, _, width = schedule.index.shape
        mode = worker.kept.for_run(Compiling).mode(worker, request, steps, slots * width)
        return RoundWork(
            worker, clients, request, base, layouts, slots, schedule, start, starts, before, mode
        )

    def _blocks(self, work: RoundWork, trained: Iterator[Trained]) -> Iterator[Block]:
        for assignments, (values, losses) in zip(work.blocks(), trained, strict=True):
            yield self._block(work, assignments, values, losses)

    def _trained(self, work: RoundWork) -> Iterator[Trained]:
        """For each of the work's blocks: its trained rows and mean losses."""
        worker, request, schedule = self.worker, work.request, work.schedule
        if self._plan != request.plan:  # after a freeze the old step is not needed again
            self._steps.clear()
            self._plan = request.plan
        step = self._step(work, schedule.index.shape[2])
        step.begin(request, work.base)
        for assignments in work.blocks():
            first = work.clients[assignments[0].client]
            seed = seed_for(worker.config.seed, "dropout", first, request.round)
            with training(worker.model), seeded(seed, worker.device):
                trained = step.finish(assignments, schedule, partial(enter, step, work))
            yield trained

    def _block(
        self, work: RoundWork, assignments: Sequence[SlotAssignment], values: Tensor, losses: Tensor
    ) -> Block:
        request = work.request
        members = [work.clients[one.client] for one in assignments]
        examples = [self.worker.rows(client).train.numel() for client in members]
        metrics = dict(zip(request.method.losses_reported(), losses.unbind(dim=1), strict=True))
        block = Block(tuple(members), work.layouts.trained, work.start, values, examples, metrics)
        held = torch.stack([work.starts.held.pop(one.client) for one in assignments])
        done = finish_block(block, work, held, assignments)
        block.extra_metrics = cohort_evaluation.evaluate_block(work, block, held, done)
        if len(request.plan.shared) < len(block.layout.names):
            block = block.shared(request.plan.shared, dropped=request.method.transient_state())
        return block if done is None else with_finished(block, done)

    # Ahead of the server ---------------------------------------------------------------------------------

    def lay_out_ahead(self, clients: Sequence[str], request: TrainRequest) -> None:
        """Lay out the batches of clients that will probably get this request, while the device is busy."""
        self._schedule(clients, request)

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` can do anything in this run: not if a round begins with an evaluation or a read
        from the device, which would synchronise before the last round is closed."""
        worker, config = self.worker, self.worker.config
        waits = config.dataset.client_validation or config.client.class_weights
        return worker.device.type in AHEAD_ON and not waits

    def prefetch(self, clients: Sequence[str], request: TrainRequest, base: Mapping[str, Tensor]) -> None:
        """Start the first block of the clients that will probably get this request with exactly these arrays,
        while the host closes the previous round. `request.base` has the digests known so far. Nothing is
        recorded, compiled or decided for it. If another request arrives, the block is dropped.
        """
        ahead = ahead_of(self.worker)
        ahead.prefetched = None
        if not self.can_prefetch or not self._may_prefetch(clients, request):
            return
        schedule = ahead.schedule
        versions, work = versions_of(base), self.prepare(clients, request, base, {})
        ahead.schedule = schedule  # the real request will raise it again
        ahead.prefetched = PrefetchedRound(work, self._blocks(work, self._ahead(work)), versions)

    def _may_prefetch(self, clients: Sequence[str], request: TrainRequest) -> bool:
        """Not if the method reads the round's model: evaluation reloads the global model while these steps
        still read it."""
        method, worker = request.method, self.worker
        if method.reads_start() or method.has_arrays() or not self._may_run_ahead(request):
            return False
        if self._plan != request.plan or worker.kept.for_run(Compiling).undecided(worker):
            return False
        slots, schedule = self._room(clients, request), self._schedule(clients, request)
        kind = (request.kind, slots, schedule.index.shape[2])
        # Not a step whose compilation failed: it is replaced.
        steps = [
            step for (*key, mode), step in self._steps.items() if tuple(key) == kind and step.mode == mode
        ]
        ready = any(step.ready for step in steps)
        return ready and schedule.assignments[:slots][-1].end <= MOST_AHEAD

    def _may_run_ahead(self, request: TrainRequest) -> bool:
        """Whether a block may train while the previous one is evaluated: not if evaluation loads clients'
        models, and not if clients keep arrays."""
        worker, method = self.worker, request.method
        one_by_one = cohort_evaluation.evaluates_one_by_one(worker, request)
        keeps = method.client_state or not method.adds_nothing() or one_by_one
        keeps = keeps or method.evaluates_start()
        return worker.device.type in AHEAD_ON and not keeps

    def _ahead(self, work: RoundWork) -> Iterator[Trained]:
        """The results of its blocks, computed one block ahead: while the server aggregates a block, the
        device trains the next. The first starts at once."""
        trained = self._trained(work)
        if self.worker.device.type != "cuda":
            return chain([next(trained)], trained)
        started = self._on_side_stream(trained)
        next(started)
        return (block for block in started if block is not None)

    def _on_side_stream(self, trained: Iterator[Trained]) -> Iterator[Trained | None]:
        """The same on a separate CUDA stream: first None, once the first block has started, then blocks."""
        here = torch.cuda.current_stream(self.worker.device)
        side = self._side_stream = self._side_stream or torch.cuda.Stream(self.worker.device)
        side.wait_stream(here)

        def begin() -> tuple[Trained | None, torch.cuda.Event]:
            with torch.cuda.stream(side):
                return next(trained, None), side.record_event()

        try:
            block, over = begin()
            yield None
            while block is not None:
                following = begin()
                here.wait_event(over)
                for value in block:  # do not reuse its memory before this stream's work is done
                    value.record_stream(here)
                yield block
                block, over = following
        finally:  # the memory that it reads is freed here
            here.wait_stream(side)

    # Steps and slots -------------------------------------------------------------------------------------

    def _schedule(self, clients: Sequence[str], request: TrainRequest) -> Schedule:
        """The batches of this work; the first call lays them out."""
        slots, ahead = self._room(clients, request), ahead_of(self.worker)
        work = (tuple(clients), request.round, request.plan, slots, tuple(request.most_steps.items()))
        known, schedule = ahead.schedule or (None, None)
        if schedule is None or known != work:
            schedule = lay_out(self.worker, clients, request, slots)
            ahead.schedule = work, schedule
        return schedule

    def _layouts(self, request: TrainRequest) -> Layouts:
        """The rows' layouts. Shared parameters come first, so that aggregation reads one contiguous part of
        every row."""
        known, layouts = self._laid or (None, None)
        if layouts is None or known != request.kind:  # usually unchanged since the last round
            trained = set(request.plan.trained)
            own = (name for name in request.plan.private if name in trained)
            layouts = Layouts.of(self.worker.parameters, request, (*request.plan.shared, *own))
            self._laid = request.kind, layouts
        return layouts

    def _step(self, work: RoundWork, width: int) -> Step:
        request = work.request
        key = (request.kind, work.slots, width, work.mode)
        if key not in self._steps:
            # Steps of another mode are not needed again.
            self._steps = {other: step for other, step in self._steps.items() if other[-1] == work.mode}
            self._steps[key] = Step(self.worker, work.layouts, work.slots, request, mode=work.mode)
        return self._steps[key]

    def _room(self, clients: Sequence[str], request: TrainRequest) -> int:
        """The number of slots: chosen once, because a step is compiled for one size."""
        if self._slots is None:
            known = self._typical or clients
            counts = batch_counts(self.worker.data, known, request.plan)
            self._slots = cheapest_size(counts, self._largest(known, request))
            if self._slots < len(known):
                log.info("The cohort of %d trains %s at a time.", len(known), counted(self._slots, "client"))
        return self._slots

    def _largest(self, clients: Sequence[str], request: TrainRequest) -> int:
        limit = min(self.worker.config.runtime.max_block or len(clients), len(clients))
        if self.worker.device.type != "cuda":
            return limit
        fits = self._fitting(clients[0], request)
        if fits < limit:
            log.info("The GPU's free memory holds %d of the %d clients at once.", fits, len(clients))
        return min(limit, fits)

    def _fitting(self, client: str, request: TrainRequest) -> int:
        return fitting_clients(self.worker, self._layouts(request), client, request)
