"""A round of nodes that take real time, which does not wait for all of them (`pacing`).

The server keeps nodes at work and steps when enough replies are in. A node that is slow, gone or asleep
holds nobody up: its reply counts when it comes, by its staleness, and a node that comes back is asked like
any other that is free. Replies enter the sum in an order that does not depend on that of their arrival.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from flwr.app import Message

from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.client_metrics import declared_metrics
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server import reply_check
from fedfrozen_app.server.live_pacing import InFlight, LivePacing, wanted_share
from fedfrozen_app.server.paced_round import PacedRound
from fedfrozen_app.server.pacer import ClosedRound, replies_of_a_step
from fedfrozen_app.server.request_messages import RequestMessages
from fedfrozen_app.server.round_trip import CRASHES
from fedfrozen_app.server.sampling import cohort_size, draw_cohort, draw_more, population_of
from fedfrozen_app.server.transport import has_crashed, is_gone

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 0.01, 0.5  # seconds between two looks for replies


class LiveRound(PacedRound):
    pacing: LivePacing

    def _draw(self, nodes: Mapping[str, int]) -> list[str]:
        """Nobody yet: who is free shows while the round runs."""
        self.closed = ClosedRound()
        self._nodes = nodes
        self._asked: set[str] = set()  # in this round
        self._crashes: Counter[str] = Counter()
        self._draws = 0
        return []

    def _collect(self) -> None:
        began = time.monotonic()
        pacing, transport = self.pacing, self.strategy.federation.connection.transport
        self._ends_at = began + (pacing.pacer.config.seconds or transport.timeout)
        arrived: list[tuple[InFlight, Reply | str]] = []
        pause = SHORTEST
        while not self._is_over(arrived):
            self._ask_free()
            one = next(self._arrivals(), None)
            if one is not None:
                arrived.append(one)
                pause = SHORTEST
                continue
            if time.monotonic() >= self._ends_at or not pacing.flights:
                break
            transport.pause(pause)
            pause = min(2 * pause, LONGEST)
            self._nodes = self.strategy.federation.connection.nodes_of_round()
        self._give_up()
        self._sum_up(arrived)

    def _is_over(self, arrived: Sequence[tuple[InFlight, Reply | str]]) -> bool:
        config, pacer = self.pacing.pacer.config, self.pacing.pacer
        if config.name == "deadline":
            fresh = sum(flight.version == self.number for flight, _ in arrived)
            # A round for which nobody was free waits for the next reply.
            return fresh >= wanted_share(config.share, len(self._asked)) if self._asked else bool(arrived)
        used = sum(not pacer.is_dropped(flight.assignment(0.0), self.number) for flight, _ in arrived)
        return used >= replies_of_a_step(config, self._places)

    @property
    def _places(self) -> int:
        """How many nodes are at work at any time."""
        pacer = self.pacing.pacer
        return pacer.config.concurrency or cohort_size(pacer.participation, max(1, len(self._nodes)))

    # Requests ----------------------------------------------------------------------------------------

    def _free(self) -> list[str]:
        """Nodes that may be asked now: none twice for one version of the model."""
        busy = {*self.pacing.flights, *self._asked}
        return [client for client in population_of(self._nodes) if client not in busy]

    def _ask_free(self) -> None:
        pacer, free = self.pacing.pacer, self._free()
        if pacer.config.name == "deadline":
            drawn = {*draw_cohort(self._nodes, pacer.participation, pacer.seed, self.number)}
            chosen = [client for client in free if client in drawn]
        else:
            count = min(self._places - len(self.pacing.flights), len(free))
            chosen = draw_more(free, count, pacer.seed, self.number, self._draws) if count > 0 else []
            self._draws += bool(chosen)
        if not chosen:
            return
        connection = self.strategy.federation.connection
        trip, messages = self._trip(chosen, None), RequestMessages(connection, self.record.traffic)
        requests = [trip.client_request(client, self._nodes[client]) for client in chosen]
        sent = connection.transport.send([messages.make(one, messages.missing(one)) for one in requests])
        now = time.monotonic()
        for asked, message_id in zip(requests, sent, strict=True):
            self._asked.add(asked.client)
            self.pacing.flights[asked.client] = InFlight.of(asked, message_id, now)
            state = f"was sent the request of round {self.number}"
            connection.membership.last_state[asked.client] = state
            self.closed.asked.append(self.pacing.flights[asked.client].assignment(now))

    # Replies -----------------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[tuple[InFlight, Reply | str]]:
        """Replies that are in, one at a time: those that no step needs yet stay where they are."""
        transport = self.strategy.federation.connection.transport
        for client, flight in list(self.pacing.flights.items()):
            message = transport.receive(flight.message_id, 0.0)
            if message is None:
                continue
            if (reply := self._read(flight, message)) is not None:
                del self.pacing.flights[client]
                answered = "did not answer" if isinstance(reply, str) else "answered"
                last_state = self.strategy.federation.connection.membership.last_state
                last_state[client] = f"{answered} round {flight.version}"
                yield flight, reply

    def _read(self, flight: InFlight, message: Message) -> Reply | str | None:
        """The reply, checked under its own request; None while there is none: the node is gone, or was sent
        what it lacks."""
        connection, asked = self.strategy.federation.connection, flight.asked
        if is_gone(message) or has_crashed(message):
            return self._lost(flight, message)
        reply = reply_check.read(connection, asked, message, self.record.traffic)
        foundation = connection.foundation
        if asked.client not in foundation.clients and foundation.is_asked_for(reply, asked.request):
            foundation.clients.add(asked.client)
            request, model = foundation.add_to(asked.request, asked.model)
            flight.asked = asked._replace(request=request, model=model)
            names = connection.membership.ledger.missing(asked.client, request.base)
            self._send_again(flight, names)
            return None
        lacks = [] if isinstance(reply, str) or reply.request != asked.request.digest else reply.lacks
        if lacks and flight.sent_again < 2:  # first what it lacks; then all, which works without a cache
            names = [name for name in asked.request.base if flight.sent_again or name in lacks]
            log.info("Client %s lacks %s.", asked.client, counted(len(lacks), "array"))
            self._send_again(flight, names)
            return None
        declared = declared_metrics(asked.request, self.strategy.client_metric_names())
        return reply_check.check(connection, asked, reply, declared)

    def _send_again(self, flight: InFlight, names: list[str]) -> None:
        connection = self.strategy.federation.connection
        messages = RequestMessages(connection, self.record.traffic)
        (flight.message_id,) = connection.transport.send([messages.make(flight.asked, names, lacking=True)])
        flight.sent_again += 1

    def _lost(self, flight: InFlight, message: Message) -> str | None:
        """The node is free again, and asked again when it is there. One that crashes again and again in a
        round has failed."""
        client = flight.asked.client
        self._crashes[client] += has_crashed(message)
        if self._crashes[client] >= CRASHES:
            return f"failed {CRASHES} times: {message.error.reason or 'its executor ended'}"
        title = self.strategy.federation.connection.membership.called(client)
        log.warning("%s lost the request of round %d: it is asked again.", title, flight.version)
        del self.pacing.flights[client]
        self._asked.discard(client)
        return None

    def _give_up(self) -> None:
        """Requests without a reply for so long that Flower keeps them no more: the nodes are free again."""
        limit = time.monotonic() - self.strategy.federation.connection.transport.timeout
        for client, flight in list(self.pacing.flights.items()):
            if flight.sent_at < limit:
                title = self.strategy.federation.connection.membership.called(client)
                log.warning("%s has not answered round %d: it is given up.", title, flight.version)
                del self.pacing.flights[client]

    def _sum_up(self, arrived: Sequence[tuple[InFlight, Reply | str]]) -> None:
        """In the order of a paced round: this version's by client, then late ones by version and client."""
        now, late = time.monotonic(), []
        ordered = sorted(arrived, key=lambda one: (one[0].version, natural_order(one[0].asked.client)))
        for flight, reply in ordered:
            client, assignment = flight.asked.client, flight.assignment(now)
            if self.pacing.pacer.is_dropped(assignment, self.number):
                self.closed.dropped.append(assignment)
                self.record.note_spent(client, reply)
                continue
            self.closed.used.append(assignment)
            if flight.version == self.number:
                self._take(client, reply)
            else:
                shown = flight.version, client, reply, flight.asked.model
                self.strategy.federation.show_upload(*shown)
                late.append((assignment, flight.late(reply)))
        for one, update in late:
            self._take_late(one, update)
        if not self.closed.used:
            self.record.discarded = "no reply was in when it closed"

    def _complete(self, row: Row) -> None:
        self._add_staleness(row, list(self.pacing.flights))
        row["pacing"]["asked"] = list(dict.fromkeys(one.client for one in self.closed.asked))
