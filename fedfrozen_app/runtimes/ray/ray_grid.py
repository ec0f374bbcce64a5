"""A grid whose clients train in parts on Ray actors. Clients' kept state is stored here between rounds."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedfrozen_app.exchange.masking_messages import envelopes_of
from fedfrozen_app.exchange.messages import Reply, ReplyRecord, read_train, train_reply
from fedfrozen_app.exchange.summed import PartialSums, SumInstructions, SummedPart, SummedReply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_state import held_at_home
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.slots import batch_counts
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid, failed_because, is_train
from fedfrozen_app.runtimes.ray.packing import Packed, packed_state, restore_state
from fedfrozen_app.runtimes.ray.part import ClientOrder, ClientReply, PackedSums, PartOrder, PartReply, deal
from fedfrozen_app.runtimes.ray.pool import Actor, ActorPool, Part

log = logging.getLogger(__name__)


@dataclass
class SentPart:
    """A part in flight: its messages by client, in the order in which their replies are read."""

    part: Part
    messages: dict[str, Message]


@dataclass
class Needed:
    """The arrays of the requests that are sent together, by digest."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    common: frozenset[str] = frozenset()  # those that every request names
    store: Callable[[Packed], Any] = lambda packed: packed  # for all workers
    _stored: dict[frozenset[str], Any] = field(default_factory=dict)

    def add(self, request: TrainRequest, base: Mapping[str, Tensor]) -> None:
        digests = frozenset(request.base.values())
        self.common = digests & self.common if self.arrays else digests
        self.arrays |= {request.base[name]: value for name, value in base.items()}

    def stored(self, wanted: frozenset[str]) -> Any:
        """Store these arrays once for all workers that lack the same."""
        if wanted not in self._stored:
            self._stored[wanted] = self.store(self.packed(wanted))
        return self._stored[wanted]

    def packed(self, wanted: frozenset[str]) -> Packed:
        return Packed.of({key: value for key, value in self.arrays.items() if key in wanted})


class RayGrid(InProcessGrid):
    """Trains a round's clients in parts; all other messages are answered in this process."""

    def __init__(
        self,
        app: ClientApp,
        num_partitions: int,
        run_config: dict[str, str],
        worker: Worker,
        pool: ActorPool,
    ) -> None:
        super().__init__(app, num_partitions, run_config)
        self._worker, self._pool = worker, pool
        self._how: SumInstructions | None = None
        self._sent: dict[str, SentPart] = {}  # by message, until its reply is read
        self._ready: dict[str, Message] = {}

    def sum_replies(self, how: SumInstructions | None) -> None:
        """Set how replies to the next train messages are summed. None: each has its arrays."""
        self._how = how

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        sent = super().push_messages(messages)
        if asked := [message for message in messages if is_train(message)]:
            self._send(asked)
        return sent

    def schedule(self, message_ids: Sequence[str]) -> list[list[str]]:
        """The order in which replies are read: part by part, in the order of completion."""
        wanted, blocks = set(message_ids), []
        for part in dict.fromkeys(map(id, (self._sent[i] for i in message_ids if i in self._sent))):
            block = [i for i, sent in self._sent.items() if id(sent) == part and i in wanted]
            blocks.append(block)
            wanted -= set(block)
        return [*([i] for i in message_ids if i in wanted), *blocks]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            if message_id in self._sent:
                self._read(self._sent[message_id])
            if message_id in self._ready:
                replies.append(self._ready.pop(message_id))
            else:
                replies += super().pull_messages([message_id])
        return replies

    def close(self) -> None:
        self._pool.close()

    # Requests ------------------------------------------------------------------------------------------

    def _send(self, messages: Sequence[Message]) -> None:
        """Divide these clients into parts, by their batches, and let the workers train them."""
        how, self._how = self._how, None
        requests: dict[str, TrainRequest] = {}  # by their texts
        asked: list[tuple[str, Message, TrainRequest]] = []
        needed = Needed(store=self._pool.store)
        known: dict[int, tuple[TrainRequest, list[str]]] = {}  # by the content that clients share
        for message in messages:
            if id(message.content) not in known:
                known[id(message.content)] = self._complete(message, needed)
            request, lacks = known[id(message.content)]
            if lacks:
                number = message.metadata.message_id
                self._ready[number] = train_reply(message, Reply(request.digest, lacks=lacks), local=True)
                self.waiting.pop(number)
                continue
            requests.setdefault(request.json, request)
            asked.append((self._client(message), message, request))
        if not asked:
            return
        clients, first = [client for client, _, _ in asked], asked[0][2]
        counts = batch_counts(self._worker.data, clients, first.plan, first.most_steps)
        for part, places in enumerate(deal(counts, self._pool.setup.parts)):
            if places:
                self._send_part(part, [asked[place] for place in places], how, needed)

    def _complete(self, message: Message, needed: Needed) -> tuple[TrainRequest, list[str]]:
        """The request of a message, and the arrays of its base that the client lacks."""
        request, arrays = read_train(message)
        home = held_at_home(self.contexts[message.metadata.dst_node_id], request, arrays)
        cache = self._worker.cache_of(self._client(message))
        base, lacks = cache.complete(request.base, {**home, **arrays}, verify=False)
        if not lacks:
            needed.add(request, base)
        return request, lacks

    def _send_part(
        self,
        number: int,
        asked: Sequence[tuple[str, Message, TrainRequest]],
        how: SumInstructions | None,
        needed: Needed,
    ) -> None:
        texts = list(dict.fromkeys(request.json for _, _, request in asked))
        wanted = frozenset(key for _, _, request in asked for key in request.base.values())
        clients = tuple(
            ClientOrder(
                client,
                texts.index(request.json),
                packed_state(self.contexts[message.metadata.dst_node_id].state),
                envelopes_of(message),
            )
            for client, message, request in asked
        )
        compiling = self._worker.kept.for_run(Compiling).state_dict()

        def submit(actor: Actor) -> Any:
            lacked = wanted - actor.held
            actor.held = wanted
            own = needed.packed(lacked - needed.common)
            order = PartOrder(tuple(texts), clients, own, how, compiling)
            return actor.handle.train.remote(order, needed.stored(lacked & needed.common))

        part = Part(number, len(asked), submit)
        sent = SentPart(part, {client: message for client, message, _ in asked})
        for message in sent.messages.values():
            self._sent[message.metadata.message_id] = sent
        self._pool.submit(part)

    # Replies -------------------------------------------------------------------------------------------

    def _read(self, sent: SentPart) -> None:
        """Wait for a part, store its clients' state, and create their replies."""
        reply = self._pool.wait(sent.part)
        for level, name, text in reply.notes:
            logging.getLogger(name).log(level, "%s", text)
        if sent.part.number == 0:
            self._worker.kept.for_run(Compiling).load_state_dict(reply.compiling)
        summed = self._summed_part(reply)
        for number, own in enumerate(reply.replies):
            message = sent.messages[own.client]
            message_id = message.metadata.message_id
            self.waiting.pop(message_id)
            del self._sent[message_id]
            if own.reply is not None:
                restore_state(self.contexts[message.metadata.dst_node_id].state, own.state)
            self._ready[message_id] = self._reply_message(message, own, number, summed, reply)

    def _summed_part(self, reply: PartReply) -> SummedPart | None:
        if reply.sums is None:
            return None
        # Replies without sums, such as errors, are never queried.
        return SummedPart(
            unpacked_sums(reply.sums, self._worker.device),
            [one.refused if one.specs is not None else "is not in the sum" for one in reply.replies],
            [one.norm for one in reply.replies],
        )

    def _reply_message(
        self, message: Message, own: ClientReply, number: int, summed: SummedPart | None, part: PartReply
    ) -> Message:
        if own.reply is None:
            return failed_because(message, own.error)
        if own.specs is not None and summed is not None:
            own.reply.arrays = SummedReply(summed, number, part.specs[own.specs])
        elif own.arrays is not None:
            own.reply.arrays = own.arrays.unpack(self._worker.device)
        content = RecordDict({"arrays": ReplyRecord(own.reply)})
        return Message(content, reply_to=message)


def unpacked_sums(packed: PackedSums, device: torch.device) -> PartialSums:
    return PartialSums(
        packed.sums.unpack(device),
        packed.weights,
        packed.squares.unpack(device),
        packed.examples,
        packed.replies,
    )
