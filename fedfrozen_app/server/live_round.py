"""A round of real nodes that does not wait for all of them (`pacing`).

The server keeps nodes busy and steps when enough replies have arrived. A node that is slow, disconnected or
closed delays no other: its reply counts on arrival, by its staleness, and a node that comes back gets
requests like any other idle one. Replies enter the sum in an order that does not depend on the order of their
arrival.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.flights import Arrival, Flights
from fedfrozen_app.server.live_pacing import LivePacing, wanted_share
from fedfrozen_app.server.paced_round import PacedRound
from fedfrozen_app.server.pacer import ClosedRound, replies_of_a_step
from fedfrozen_app.server.request_messages import RequestMessages
from fedfrozen_app.server.sampling import cohort_size, draw_cohort, draw_more, population_of

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 0.01, 0.5  # seconds between two polls for replies


class LiveRound(PacedRound):
    pacing: LivePacing

    def _draw(self, nodes: Mapping[str, int]) -> list[str]:
        """Draw nobody yet: idle nodes are known only while the round runs."""
        connection = self.strategy.federation.connection
        connection.lateness.round = self.number
        self.closed = ClosedRound()
        self._nodes = nodes
        self._draws = 0
        self._flights = Flights(
            self.pacing,
            connection,
            RequestMessages(connection, self.record.traffic),
            self.strategy.client_metric_names(),
            lambda flight: self.pacing.pacer.is_dropped(flight.assignment(0.0), self.number),
        )
        self._resume()
        return []

    def _resume(self) -> None:
        """In the first round of a resumed run: restore interrupted requests and the list of clients asked."""
        strategy, connection = self.strategy, self.strategy.federation.connection
        if self.pacing.asked is not None:
            self._flights.owed = self.pacing.asked.read(self.number)
        if not self.pacing.interrupted:
            return
        held = {strategy.digests[name]: value for name, value in strategy.model.items()}
        if self.pacing.unknown(held):  # for clients that were sent the weights that others load themselves
            held |= connection.foundation.by_digest()
        for client, flight in self.pacing.resumed(held, strategy.model).items():
            if flight is None:
                log.warning(
                    "The request that client %s was at work on cannot be made again: it is free, and what it "
                    "has trained for that request is lost.",
                    client,
                )
            else:
                self.pacing.flights[client] = flight
        if again := len(self.pacing.flights):
            log.info("%s at work when the run was interrupted: asking again.", counted(again, "request"))

    def _collect(self) -> None:
        transport = self.strategy.federation.connection.transport
        self._limit = self.pacing.pacer.config.seconds or transport.timeout
        self._ends_at = time.monotonic() + self._limit
        arrived: list[Arrival] = []
        pause = SHORTEST
        while not self._is_over(arrived):
            self._flights.send_lost(self._nodes)
            self._ask_free()
            one = next(self._flights.arrivals(), None)
            if one is not None:
                arrived.append(one)
                pause = SHORTEST
                continue
            if self._must_close(arrived):
                break
            transport.pause(pause)
            pause = min(2 * pause, LONGEST)
            self._nodes = self.strategy.federation.connection.nodes_of_round()
        self._flights.give_up()
        self._sum_up(arrived)

    def _is_over(self, arrived: Sequence[Arrival]) -> bool:
        config, pacer = self.pacing.pacer.config, self.pacing.pacer
        if config.name == "deadline":
            fresh = sum(flight.version == self.number for flight, _ in arrived)
            # A round without idle nodes waits for the next reply.
            asked = len(self._flights.asked)
            return fresh >= wanted_share(config.share, asked) if asked else bool(arrived)
        used = sum(
            not isinstance(reply, str) and not pacer.is_dropped(flight.assignment(0.0), self.number)
            for flight, reply in arrived
        )
        return used >= replies_of_a_step(config, self._places) and not self._owed_now()

    def _must_close(self, arrived: Sequence[Arrival]) -> bool:
        """Whether no more replies can arrive, or the time is over. Time does not run while no node is busy:
        all may be outside their opening hours."""
        if self.pacing.at_nodes or self._to_send_again():
            return time.monotonic() >= self._ends_at
        self._ends_at = time.monotonic() + self._limit
        return bool(arrived)

    @property
    def _places(self) -> int:
        """The number of nodes that are busy at any time."""
        pacer = self.pacing.pacer
        return pacer.config.concurrency or cohort_size(pacer.participation, max(1, len(self._nodes)))

    # Requests ----------------------------------------------------------------------------------------

    def _free(self) -> list[str]:
        """Nodes that may get a request now: none twice for one version of the model."""
        busy = {*self.pacing.flights, *self._flights.asked}
        return [client for client in self._present(population_of(self._nodes)) if client not in busy]

    def _present(self, clients: Iterable[str]) -> list[str]:
        """The clients that are connected and open."""
        closed = self.strategy.federation.connection.closed
        return [client for client in clients if client in self._nodes and not closed.is_closed(client)]

    def _to_send_again(self) -> list[str]:
        flights = self.pacing.flights.items()
        return self._present(client for client, flight in flights if flight.message_id is None)

    def _owed_now(self) -> list[str]:
        """Connected nodes that got this round's request before the run was interrupted."""
        asked = self._flights.asked
        return self._present(client for client in self._flights.owed if client not in asked)

    def _ask_free(self) -> None:
        pacer, free = self.pacing.pacer, self._free()
        if pacer.config.name == "deadline":
            everybody = self.strategy.federation.population(self._nodes)
            drawn = {*draw_cohort(everybody, pacer.participation, pacer.seed, self.number)}
            chosen = [client for client in free if client in drawn]
        else:
            chosen = [client for client in self._owed_now() if client in free]
            others = [client for client in free if client not in chosen]
            places = self._places - len(self.pacing.at_nodes) - len(chosen)
            if (count := min(places, len(others))) > 0:
                chosen += draw_more(others, count, pacer.seed, self.number, self._draws)
                self._draws += 1
        if chosen:
            trip = self._trip(chosen, None)
            requests = [trip.client_request(client, self._nodes[client]) for client in chosen]
            self._flights.send(self.number, requests)

    # Replies -----------------------------------------------------------------------------------------

    def _sum_up(self, arrived: Sequence[Arrival]) -> None:
        """Add replies in the order of a paced round: this version's by client, then late ones by version."""
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
        row["pacing"]["asked"] = self._flights.asked
        closed = self.strategy.federation.connection.closed
        others = {
            "given_up": self._flights.dropped,
            "outside_hours": [client for client in population_of(self._nodes) if closed.is_closed(client)],
        }
        row["pacing"] |= {key: clients for key, clients in others.items() if clients}
