"""The requests in flight, as one round sends, receives and repeats them.

A lost request is sent again unchanged: a site that has trained for it sends its stored reply, and neither
trains nor pays twice. A site outside its opening hours gets no messages until it opens.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flwr.app import Message

from fedfrozen_app.core.formatting import counted, quoted
from fedfrozen_app.exchange.client_metrics import declared_metrics
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.server import reply_check
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.lateness import Awaited, Lateness
from fedfrozen_app.server.live_pacing import InFlight, LivePacing
from fedfrozen_app.server.request_messages import ClientRequest, RequestMessages
from fedfrozen_app.server.round_trip import CRASHES
from fedfrozen_app.server.transport import Probes, has_crashed, is_gone

log = logging.getLogger(__name__)
Arrival = tuple[InFlight, Reply | str]
PAUSE = 2.0  # seconds until a lost request is sent again: its node may still seem connected


@dataclass
class Flights:
    pacing: LivePacing
    connection: Connection
    messages: RequestMessages  # counts its bytes in this round
    metric_names: Sequence[str] = ()  # metrics that clients may send besides those of a request
    is_too_old: Callable[[InFlight], bool] = lambda flight: False  # whether its reply would be too old
    asked: list[str] = field(default_factory=list)  # clients of this round's requests, in order
    owed: list[str] = field(default_factory=list)  # clients asked before the run was resumed
    dropped: list[str] = field(default_factory=list)  # clients whose requests are dropped

    def send(self, server_round: int, requests: Sequence[ClientRequest]) -> None:
        """Send new requests to idle nodes. Their names are on disk before the requests are sent."""
        self.asked += [one.client for one in requests]
        if self.pacing.asked is not None:
            self.pacing.asked.write(server_round, list(dict.fromkeys([*self.asked, *self.owed])))
        flights = [InFlight.of(one, None, 0.0) for one in requests]
        self._push(flights)
        self.pacing.flights.update({flight.asked.client: flight for flight in flights})

    def send_lost(self, nodes: Mapping[str, int]) -> None:
        """Send lost requests again to nodes that are connected; drop those whose replies would be too old."""
        now, due = time.monotonic(), []
        for client, flight in list(self.pacing.flights.items()):
            if flight.message_id is not None or now < flight.due_at:
                continue
            if self.is_too_old(flight):
                self._drop(client, "is too old to count")
            elif client in nodes and not self.connection.closed.is_closed(client):
                flight.asked = flight.asked._replace(node=nodes[client])
                due.append(flight)
        for flight in due:
            title = self.connection.membership.called(flight.asked.client)
            log.info("%s is sent the request of round %d again.", title, flight.version)
        self._push(due)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield arrived replies one at a time: replies that no step needs yet are not fetched."""
        transport, last_state = self.connection.transport, self.connection.membership.last_state
        for flight in self.pacing.at_nodes:
            assert flight.message_id is not None
            client, message = flight.asked.client, transport.receive(flight.message_id, 0.0)
            if message is None and self._is_lost(flight):
                message = transport.receive(flight.message_id, 0.0)  # it may have answered both since
                if message is None:
                    self._lose(flight, "it is back without it")
            if message is not None and (reply := self._read(flight, message)) is not None:
                del self.pacing.flights[client]
                self._ended(flight, answered=not isinstance(reply, str))
                answered = "did not answer" if isinstance(reply, str) else "answered"
                last_state[client] = f"{answered} round {flight.version}"
                yield flight, reply

    def give_up(self) -> None:
        """Drop requests that Flower has discarded after their time to live: the nodes are idle again."""
        limit = time.monotonic() - self.connection.transport.timeout
        for client, flight in list(self.pacing.flights.items()):
            if flight.sent_at < limit:
                self._drop(client, f"has no reply since {self.connection.transport.timeout:g} s")

    def _push(self, flights: list[InFlight]) -> None:
        transport, membership = self.connection.transport, self.connection.membership
        sent = transport.send([self.messages.make(f.asked, self.messages.missing(f.asked)) for f in flights])
        now = time.monotonic()
        for flight, message_id in zip(flights, sent, strict=True):
            client, node = flight.asked.client, flight.asked.node
            flight.message_id, flight.sent_at, flight.sent_again = message_id, now, 0
            if membership.has_executor(node):
                flight.probes = Probes(transport, node)
            known = self.pacing.lateness.setdefault(client, Lateness())
            title = partial(membership.called, client)
            flight.awaited = Awaited(
                known, title, flight.version, now + transport.timeout, now, client, holds_up=False
            )
            self.connection.lateness.at_work[client] = flight.awaited
            membership.last_state[client] = f"was sent the request of round {flight.version}"

    # Replies -----------------------------------------------------------------------------------------

    def _read(self, flight: InFlight, message: Message) -> Reply | str | None:
        """The reply, checked against its own request; None while there is none: the node is disconnected or
        closed, or was sent missing arrays."""
        connection, asked = self.connection, flight.asked
        if is_gone(message) or has_crashed(message):
            return self._lost(flight, message)
        reply = reply_check.read(connection, asked, message, self.messages.traffic)
        if isinstance(reply, Reply) and reply.opens_in:
            self._close(flight, reply.opens_in)
            return None
        foundation = connection.foundation
        if asked.client not in foundation.clients and foundation.is_asked_for(reply, asked.request):
            foundation.clients.add(asked.client)
            request, model = foundation.add_to(asked.request, asked.model)
            flight.asked = asked._replace(request=request, model=model)
            self._send_again(flight, self.messages.missing(flight.asked))
            return None
        lacks = [] if isinstance(reply, str) or reply.request != asked.request.digest else reply.lacks
        if lacks and flight.sent_again < 2:  # first the missing arrays; then all, which works without a cache
            names = [name for name in asked.request.base if flight.sent_again or name in lacks]
            log.info("Client %s lacks %s.", asked.client, counted(len(lacks), "array"))
            self._send_again(flight, names)
            return None
        declared = declared_metrics(asked.request, self.metric_names)
        return reply_check.check(connection, asked, reply, declared)

    def _send_again(self, flight: InFlight, names: list[str]) -> None:
        message = self.messages.make(flight.asked, names, lacking=True)
        (flight.message_id,) = self.connection.transport.send([message])
        flight.sent_again += 1

    def _close(self, flight: InFlight, opens_in: float) -> None:
        """Note that the site has not started. Its request is sent again when it opens."""
        client, membership = flight.asked.client, self.connection.membership
        self.connection.closed.close(client, membership.called(client), opens_in)
        membership.last_state[client] = f"was closed in round {flight.version}"
        self._ended(flight, answered=True)
        if flight.repeated:
            flight.lose(0.0)
        else:
            del self.pacing.flights[client]
            self.asked = [one for one in self.asked if one != client]

    # Lost requests -----------------------------------------------------------------------------------

    def _is_lost(self, flight: InFlight) -> bool:
        """Whether the site is back without the request. Also warns of a late reply."""
        now = time.monotonic()
        if flight.awaited is not None and now >= flight.awaited.late_at:
            flight.awaited.warn_late()
        return flight.probes is not None and flight.probes.answered(now)

    def _lost(self, flight: InFlight, message: Message) -> str | None:
        """Note a lost request; a node whose executor fails on it repeatedly has failed."""
        flight.crashes += has_crashed(message)
        reason = message.error.reason or "its executor ended"
        if flight.crashes > CRASHES:
            return f"failed {flight.crashes} times: {reason}"
        self._lose(flight, reason)
        return None

    def _lose(self, flight: InFlight, reason: str) -> None:
        title = self.connection.membership.called(flight.asked.client)
        log.warning(
            "%s lost the request of round %d (%s): it is sent again.", title, flight.version, quoted(reason)
        )
        flight.lose(PAUSE)

    def _drop(self, client: str, why: str) -> None:
        flight = self.pacing.flights.pop(client)
        self.dropped.append(client)
        self._ended(flight, answered=False)
        title = self.connection.membership.called(client)
        log.warning("%s: the request of round %d %s, and is dropped.", title, flight.version, why)

    def _ended(self, flight: InFlight, *, answered: bool) -> None:
        self.connection.lateness.at_work.pop(flight.asked.client, None)
        if flight.awaited is not None:
            known = flight.awaited.lateness
            flight.awaited.ended(answered=answered)
            if answered:  # no repeated warnings about a node that is always slow
                known.slowest = max(known.slowest, time.monotonic() - flight.awaited.began)
