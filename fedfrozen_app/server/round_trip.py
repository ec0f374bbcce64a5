"""One round's requests and replies: send, resend lost requests and missing arrays, check replies."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from flwr.app import Message
from torch import Tensor

from fedfrozen_app.core.formatting import clock_time, counted
from fedfrozen_app.exchange.client_metrics import declared_metrics
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server import reply_check
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.lateness import Awaited
from fedfrozen_app.server.request_messages import ClientRequest, RequestMessages, ToMask, with_client_arrays
from fedfrozen_app.server.transport import has_crashed, is_gone

log = logging.getLogger(__name__)
Members = Sequence[tuple[str, int]]  # client, node
CRASHES = 2  # tolerated failures of a client's executor on one request


@dataclass
class RoundTrip:
    """Send a train request to a cohort and collect the replies.

    Replies come one at a time and in the cohort's order, so that sums repeat to the bit and only one reply,
    or one block of them, is in memory, whatever the cohort's size.
    """

    connection: Connection
    request: TrainRequest
    model: Mapping[str, Tensor]
    traffic: Traffic
    # By client: arrays for this client alone, added to the base of its request.
    per_client_arrays: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    # By client: its own request in place of `request`, in a masked round.
    masked: Mapping[str, ToMask] = field(default_factory=dict)
    # Called with one reply of each block before waiting for its metrics, so that device work started here
    # overlaps with the wait.
    before_metrics: Callable[[Reply], None] | None = None
    metric_names: Sequence[str] = ()  # that clients may send in addition to those of the request
    _sent_at: float = field(default_factory=time.monotonic, init=False)

    @cached_property
    def _messages(self) -> RequestMessages:
        return RequestMessages(self.connection, self.traffic)

    @cached_property
    def _declared(self) -> frozenset[str]:
        return declared_metrics(self.request, self.metric_names)

    def replies(self, cohort: Members) -> Iterator[tuple[str, Reply | str]]:
        """Each client's valid reply, or the reason why there is none."""
        transport, last_state = self.connection.transport, self.connection.membership.last_state
        deadline = time.monotonic() + transport.timeout
        requests = [self.client_request(client, node) for client, node in cohort]
        messages = [self._messages.make(one, self._messages.missing(one)) for one in requests]
        sent = dict(zip(transport.send(messages), requests, strict=True))
        self._sent_at = time.monotonic()
        messages.clear()
        number = self.request.round
        last_state.update({one.client: f"was sent the request of round {number}" for one in requests})
        for block in transport.blocks(list(sent)):
            asked = [(sent[message_id], message_id) for message_id in block]
            for client, reply in self._block_replies(asked, deadline):
                answered = "did not answer" if isinstance(reply, str) else "answered"
                last_state[client] = f"{answered} round {number}"
                yield client, reply

    def client_request(self, client: str, node: int) -> ClientRequest:
        masked, foundation = self.masked.get(client), self.connection.foundation
        request, arrays = with_client_arrays(
            self.request if masked is None else masked.request, self.model, self.per_client_arrays.get(client)
        )
        if client in foundation.clients:
            request, arrays = foundation.add_to(request, arrays)
        return ClientRequest(client, node, request, arrays, masked)

    def _block_replies(
        self, asked: Sequence[tuple[ClientRequest, str]], deadline: float
    ) -> Iterator[tuple[str, Reply | str]]:
        """The replies of clients that trained together. All are read before the first one's metrics."""
        replied = [self._reply(one, message_id, deadline) for one, message_id in asked]
        pending = (reply for _, reply in replied if isinstance(reply, Reply) and reply.pending is not None)
        if self.before_metrics is not None and (first := next(pending, None)) is not None:
            self.before_metrics(first)
        for one, reply in replied:
            yield one.client, reply_check.check(self.connection, one, reply, self._declared)

    def _reply(
        self, asked: ClientRequest, message_id: str, deadline: float
    ) -> tuple[ClientRequest, Reply | str]:
        """The client's final reply, not checked yet, and the request that it answers."""
        asked, message = self._receive(asked, message_id, deadline)
        reply = reply_check.read(self.connection, asked, message, self.traffic)
        while isinstance(reply, Reply) and reply.opens_in and time.monotonic() + reply.opens_in < deadline:
            self._wait_until_open(asked.client, reply.opens_in)
            reply = self._send_again(asked, self._messages.missing(asked), deadline)
        foundation = self.connection.foundation
        if asked.client not in foundation.clients and foundation.is_asked_for(reply, asked.request):
            log.info("Client %s has other weights than the federation's: sending these, once.", asked.client)
            foundation.clients.add(asked.client)
            request, model = foundation.add_to(asked.request, asked.model)
            asked = asked._replace(request=request, model=model)
            reply = self._send_again(asked, self._messages.missing(asked), deadline)
        # First the missing arrays; then all of them, which works without a cache.
        for everything in (False, True):
            if isinstance(reply, str) or not reply.lacks or reply.request != asked.request.digest:
                break
            wanted = [name for name in asked.request.base if everything or name in reply.lacks]
            lacking = counted(len(reply.lacks), "array")
            log.info("Client %s lacks %s: sending %d.", asked.client, lacking, len(wanted))
            reply = self._send_again(asked, wanted, deadline, lacking=True)
        return asked, reply

    def _wait_until_open(self, client: str, seconds: float) -> None:
        """Wait until a site opens, to send its request again: it has not started."""
        closed, membership = self.connection.closed, self.connection.membership
        closed.close(client, membership.called(client), seconds)
        while closed.is_closed(client):
            self.connection.transport.pause(0.5)

    def _receive(
        self, asked: ClientRequest, message_id: str, deadline: float
    ) -> tuple[ClientRequest, Message | None]:
        """The answer. A client that disconnected or crashed gets its request again when it is back."""
        connection = self.connection
        title = partial(connection.membership.called, asked.client)
        awaited = Awaited(
            connection.lateness, title, self.request.round, deadline, self._sent_at, asked.client
        )
        connection.lateness.awaited = awaited
        message, lost = self._receive_or_lost(asked, message_id, awaited)
        crashes = 0
        # A client that disconnected has lost its secrets of a masked round and cannot be in the sum.
        while asked.masked is None and (lost or (message is not None and message.has_error())):
            if message is not None:
                crashes += has_crashed(message)
                if not is_gone(message) and not (has_crashed(message) and crashes <= CRASHES):
                    break
                if has_crashed(message):
                    awaited.warn(
                        f"lost the request of round {self.request.round} at {clock_time()} "
                        f"({message.error.reason or 'its executor failed'}): it is sent again."
                    )
            else:
                awaited.warn("is back, but its request was lost with its process: it is sent again.")
            awaited.troubled = True
            if (node := connection.membership.returned(asked.client, deadline)) is None:
                break
            # Unfinished work is lost; a finished reply is sent again without training twice.
            asked = asked._replace(node=node)
            again = self._send(asked, self._messages.missing(asked))
            message, lost = self._receive_or_lost(asked, again, awaited)
        awaited.ended(answered=message is not None and not message.has_error())
        return asked, message

    def _receive_or_lost(
        self, asked: ClientRequest, message_id: str, awaited: Awaited
    ) -> tuple[Message | None, bool]:
        probe = self.connection.membership.has_executor(asked.node)
        return self.connection.transport.receive_or_lost(
            asked.node, message_id, awaited.deadline, probe=probe, awaited=awaited
        )

    def _send(self, to: ClientRequest, names: list[str], *, lacking: bool = False) -> str:
        (message_id,) = self.connection.transport.send([self._messages.make(to, names, lacking=lacking)])
        return message_id

    def _send_again(
        self, to: ClientRequest, names: list[str], deadline: float, *, lacking: bool = False
    ) -> Reply | str:
        message = self.connection.transport.receive(self._send(to, names, lacking=lacking), deadline)
        return reply_check.read(self.connection, to, message, self.traffic)
