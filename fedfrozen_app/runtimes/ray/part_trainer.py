"""A Ray actor's work, without Ray: hold data and model, and train the clients of a part."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from flwr.app import Message
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.client_metrics import declared_metrics
from fedfrozen_app.exchange.masking_messages import with_envelopes
from fedfrozen_app.exchange.messages import Reply, message_to, read_reply, train_content, train_message
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.summed import PartialSums, SumInstructions
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.slots import batch_counts
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import install, run_key
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.runtimes.inprocess.runtime import grid_here, tuned_for_size
from fedfrozen_app.runtimes.ray.packing import Packed, packed_state, restore_state
from fedfrozen_app.runtimes.ray.part import (
    ClientReply,
    PackedSums,
    PartOrder,
    PartReply,
    deal,
)
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.norms import NormGate
from fedfrozen_app.server.transport import Transport

NO_ARRAYS = Packed.of({})
LIFETIME = 3600.0  # of a message that never leaves the process: Flower wants one


class PartTrainer:
    """Trains parts one after another, and keeps the arrays of the last one."""

    def __init__(self, worker: Worker, clients: int, settings: dict[str, str], parts: int) -> None:
        """`parts`: into how many a round is divided."""
        self.worker = worker
        self._parts = parts
        self._tuned = ExitStack()
        self._tuned.enter_context(tuned_for_size(worker))
        self._grid: InProcessGrid = grid_here(worker, clients, settings, self._runner)
        self._key = run_key(next(iter(self._grid.contexts.values())))
        self._arrays: dict[str, Tensor] = {}  # by digest

    def _runner(self, worker: Worker, typical: Sequence[str]) -> CohortRunner:
        """Make the runner. Every worker chooses its number of slots from the same part, so that any worker
        can train any part with the same result."""
        return CohortRunner(worker, typical_part(worker, typical, self._parts))

    def train(self, order: PartOrder, common: Packed = NO_ARRAYS) -> PartReply:
        """`common`: arrays, by digest, that other parts need too."""
        with noted() as notes:
            try:
                reply = self._train(order, common)
            except UserError as error:
                return PartReply([], user_error=str(error))
        reply.notes = notes
        return reply

    def _train(self, order: PartOrder, common: Packed) -> PartReply:
        install(self._key, self.worker)
        requests = [read_train_request(text) for text in order.requests]
        self._take_arrays(requests, order.own, common)
        compiling = self.worker.kept.for_run(Compiling)
        compiling.load_state_dict(order.compiling)
        messages = self._messages(order, requests)
        contexts = self._grid.contexts
        for one in order.clients:
            restore_state(contexts[_node(one.client)].state, one.state)
        sums = None if order.sums is None else Summing(self.worker, order.sums, self._arrays, requests[0])
        found: dict[str, ClientReply] = {}
        specs: dict[Any, int] = {}
        transport = Transport(self._grid, local=True)
        clients = dict(zip(transport.send(messages), order.clients, strict=True))
        for block in transport.blocks(list(clients)):
            for number in block:
                one = clients[number]
                (message,) = self._grid.pull_messages([number])
                own = client_reply(one.client, message, requests[one.request], sums, specs)
                state = contexts[_node(one.client)].state
                own.state = packed_state(state)
                restore_state(state, {})
                found[one.client] = own
        replies = [found[one.client] for one in order.clients]
        packed = None if sums is None else packed_sums(sums.partial())
        return PartReply(replies, list(specs), packed, compiling.state_dict())

    def _take_arrays(self, requests: Sequence[TrainRequest], own: Packed, common: Packed) -> None:
        device = self.worker.device
        known = self._arrays | common.unpack(device) | own.unpack(device)
        self._arrays = {key: known[key] for one in requests for key in one.base.values()}

    def _messages(self, order: PartOrder, requests: Sequence[TrainRequest]) -> list[Message]:
        """A message for each client. Those with the same request share their content."""
        templates = []
        for request in requests:
            arrays = {name: self._arrays[key] for name, key in request.base.items()}
            content = train_content(request, arrays, local=True)
            templates.append(train_message(0, request, content, ttl=LIFETIME))
        found = []
        for one in order.clients:
            message = message_to(_node(one.client), templates[one.request])
            if one.envelopes:
                message.content = with_envelopes(message.content, one.envelopes)
            found.append(message)
        return found

    def close(self) -> None:
        self._grid.close()
        self._tuned.close()


def _node(client: str) -> int:
    return int(client) + 1


def typical_part(worker: Worker, typical: Sequence[str], parts: int) -> list[str]:
    """The first part of a typical cohort, which has the longest client."""
    counts = batch_counts(worker.data, typical, Plan.full(worker.exchanged))
    places = deal(counts, min(parts, len(typical)))
    return [typical[place] for place in places[0]]


class Summing:
    """The running sum of a part's replies, by the rules of the server's mean."""

    def __init__(
        self, worker: Worker, how: SumInstructions, arrays: Mapping[str, Tensor], request: TrainRequest
    ) -> None:
        self._model = {name: arrays[key] for name, key in request.base.items()}
        self._roles, self._how = worker.roles, how
        gate = None if how.far_out is None else NormGate(how.far_out, how.median_norm)
        self._mean = RunningMean(self._model, lambda name: None, gate, equal=how.equal)

    def add(self, reply: Reply, request: TrainRequest) -> tuple[str | None, float | None]:
        """Add a reply; returns the reason if it is refused, and the norm of its update if norms are
        compared."""
        self._mean.expect(reply.arrays)
        reply.settle()
        declared = declared_metrics(request, self._how.metric_names)
        if problem := problem_of(reply, request, self._model, self._roles, declared):
            return problem, None
        norms = [] if self._mean.gate is None else self._mean.gate.norms
        before = len(norms)
        problem = self._mean.add(reply.arrays, float(reply.examples))
        return problem, norms[-1] if len(norms) > before else None

    def partial(self) -> PartialSums:
        return self._mean.partial()


def client_reply(
    client: str, message: Message, request: TrainRequest, sums: Summing | None, specs: dict[Any, int]
) -> ClientReply:
    """The reply to return; adds its arrays to the sums, if any."""
    try:
        reply = read_reply(message)
    except ValueError as error:
        reason = message.error.reason if message.has_error() else str(error)
        return ClientReply(client, error=reason or "no reason given")
    found = ClientReply(client, reply)
    if sums is not None and request.trains and not reply.declined and not reply.lacks:
        spec = tuple((name, value.shape, value.dtype) for name, value in reply.arrays.items())
        found.specs = specs.setdefault(spec, len(specs))
        found.refused, found.norm = sums.add(reply, request)
    else:
        found.arrays = Packed.of(reply.arrays)
    reply.settle()
    reply.arrays = {}
    return found


def packed_sums(found: PartialSums) -> PackedSums:
    sums, squares = Packed.of(found.sums), Packed.of(found.squares)
    return PackedSums(sums, found.weights, squares, found.examples, found.replies)


class Notes(logging.Handler):
    """Warnings of a worker, for the log of the run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append((record.levelno, record.name, record.getMessage()))


@contextmanager
def noted() -> Iterator[list[tuple[int, str, str]]]:
    handler = Notes()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.notes
    finally:
        root.removeHandler(handler)
