"""A round that does not wait for all its clients (`pacing`): replies count when they arrive.

The event queue runs first, because a client's time follows from bytes and steps that are known before it
trains. Then all clients that start from this round's model train together, stacked if the runner can: replies
that arrive in this round enter its sum, the others are kept until they arrive.

Each reply is checked, decoded and confirmed in the ledger against the request that it answers, whatever
rounds follow. Bytes down count in the round of the request, bytes up in the round of arrival, used or not.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.expected_bytes import ExpectedBytes
from fedfrozen_app.server.late_replies import LateReply
from fedfrozen_app.server.pacer import ClosedRound
from fedfrozen_app.server.pacing import Pacing
from fedfrozen_app.server.sampling import in_order, population_of
from fedfrozen_app.server.seams import StrategySeams
from fedfrozen_app.server.train_round import TrainRound

log = logging.getLogger(__name__)
DIGITS = 6  # decimals of seconds in a round's row


class PacedRound(TrainRound):
    closed: ClosedRound

    def __init__(self, strategy: StrategySeams, server_round: int) -> None:
        """Run the event queue until the server's step."""
        pacing = strategy.federation.connection.pacing
        assert pacing is not None
        self.pacing: Pacing = pacing
        self._trained: dict[str, Reply | str] = {}  # of clients that train as soon as they are asked
        super().__init__(strategy, server_round)

    def _draw(self, nodes: Mapping[str, int]) -> list[str]:
        self._nodes = nodes
        self._plan = self.strategy.client_plan(self.number)
        self._expected = ExpectedBytes(self.strategy, self.request, self.arrays)
        self.closed = self.pacing.pacer.run_round(self.number, self._population(nodes), self._ask)
        return list(in_order(tuple(one.client for one in self.closed.asked)))

    def _population(self, nodes: Mapping[str, int]) -> Sequence[str]:
        return population_of(nodes)

    def _ask(self, clients: Sequence[str], at: float) -> list[Assignment]:
        if self.request.choice is not None:  # their choice of layers determines how long they take
            trip = self._trip(clients, None)
            self._trained |= dict(trip.replies([(client, self._nodes[client]) for client in clients]))
        if self.pacing.pacer.config.partial:
            self._limit_steps(clients, at)
        return [self._assignment(client, at) for client in clients]

    def _limit_steps(self, clients: Sequence[str], at: float) -> None:
        """Limit the steps of clients that would be late. Limits lengthen the request: they are computed for
        the longest possible one."""
        whole = {client: self.pacing.times.steps(client, self._plan) for client in clients}
        self._set_limits(whole)
        limit = at + (self.pacing.pacer.config.seconds or 0.0)
        found = {
            client: self.pacing.steps_within(client, self._plan, self._expected.of(client), at, limit)
            for client in clients
        }
        self._set_limits({client: steps for client, steps in found.items() if steps < whole[client]})

    def _set_limits(self, most_steps: Mapping[str, int]) -> None:
        self.request = replace(self.request, most_steps=most_steps)
        self._expected = ExpectedBytes(self.strategy, self.request, self.arrays)

    def _assignment(self, client: str, at: float) -> Assignment:
        plan, reply = self._plan, self._trained.get(client)
        if client in self._trained and self.record.traffic.by_client is not None:
            down, up = self.record.traffic.by_client[client]
        else:
            down, up = self._expected.of(client)
        if isinstance(reply, Reply):
            plan = self._plan_taken(reply)
        most = self.request.most_steps.get(client)
        return Assignment(client, self.number, at, self.pacing.times.of(client, plan, down, up, at, most))

    def _plan_taken(self, reply: Reply) -> Plan:
        roles = self.strategy.federation.roles
        layers = layers_of(filter(is_parameter, reply.arrays), roles)
        return self.strategy.plan(self.number).keep_layers(layers, roles)

    # Replies -----------------------------------------------------------------------------------------

    @property
    def counted(self) -> list[str]:
        return sorted((one.client for one in self.closed.used), key=natural_order)

    def _collect(self) -> None:
        on_time = {one.client for one in self.closed.used if one.version == self.number}
        # First: a client whose late reply arrives may have got another request since.
        used = self._arrived(one for one in self.closed.used if one.version != self.number)
        dropped = self._arrived(self.closed.dropped)
        for client, reply in self._replies():
            if client in on_time:
                self._take(client, reply)
            else:
                self._keep(client, reply)
        for one, late in used:
            self._take_late(one, late)
        for one, late in dropped:
            self.record.traffic.arrived(one.client, late.upload)
            if isinstance(late.reply, str):
                log.warning("Round %d: client %s, late too, %s.", self.number, one.client, quoted(late.reply))
        if not self.closed.used:
            self.record.discarded = "no reply was in when it closed"

    def _arrived(self, replies: Iterable[Assignment]) -> list[tuple[Assignment, LateReply]]:
        """Late replies, in the order in which they enter the sum."""
        ordered = sorted(replies, key=lambda one: (one.version, natural_order(one.client)))
        return [(one, self.pacing.late.pop(one.client)) for one in ordered]

    def _replies(self) -> Iterator[tuple[str, Reply | str]]:
        """Replies of the clients that started from this round's model."""
        if self.request.choice is not None:
            return ((client, self._trained.pop(client)) for client in self.cohort)
        return self._trip(self.cohort, None).replies(self.members)

    def _keep(self, client: str, reply: Reply | str) -> None:
        """Keep a reply until it arrives. Its privacy is spent now: the client has trained."""
        self.record.note_spent(client, reply)
        self.strategy.federation.show_upload(self.number, client, reply, self.base)
        upload = self.record.traffic.postpone(client)
        if isinstance(reply, Reply):
            with self.record.clock.aggregation():
                used = self.pacing.pacer.uses_late
                update = self.record.aggregator.update_of(reply.arrays) if used else {}
            reply = replace(reply, arrays=update, text="")
        self.pacing.late.keep(client, LateReply(reply, upload))

    def _take_late(self, one: Assignment, late: LateReply) -> None:
        """Add a reply to an earlier round. Its values for names frozen since then are not used."""
        self.record.traffic.arrived(one.client, late.upload)
        aged = late.aged(self.pacing.weight(self.number - one.version), self.request.sent_names)
        reply, weight = self._weighed(one.client, aged)
        names = [] if isinstance(reply, str) else list(filter(is_parameter, reply.arrays))
        if self.record.take(one.client, reply, weight, is_update=True):
            self.strategy.on_reply(one.client, names)

    def prefetch_next(self, merged: Mapping[str, Tensor]) -> float:
        """Does nothing: the event queue decides which clients start from the next model."""
        return 0.0

    # The row -----------------------------------------------------------------------------------------

    def _complete(self, row: Row) -> None:
        closed, pacer = self.closed, self.pacing.pacer
        row.pop("bytes_by_client", None)
        row["virtual_seconds"] = pacer.now
        row["virtual_by_client"] = {one.client: _rounded(one) for one in closed.asked}
        row["virtual_asked"] = {one.client: round(one.asked_at, DIGITS) for one in closed.asked}
        if self.request.most_steps:
            row["local_steps"] = dict(self.request.most_steps)
        self._add_staleness(row, list(pacer.at_work))

    def _add_staleness(self, row: Row, at_work: Sequence[str]) -> None:
        """Add to the row which replies counted, and their staleness."""
        closed = self.closed
        row["clients"] = list(dict.fromkeys(row["clients"]))  # a client may have replied to two rounds
        staleness = [self.number - one.version for one in closed.used]
        row["staleness_mean"] = sum(staleness) / max(len(staleness), 1)
        row["staleness_max"] = max(staleness, default=0)
        row["clients_dropped"], row["clients_at_work"] = len(closed.dropped), len(at_work)
        row["pacing"] = {
            "used": [[one.client, self.number - one.version] for one in closed.used],
            "dropped": [[one.client, self.number - one.version] for one in closed.dropped],
            "at_work": list(at_work),
        }


def _rounded(one: Assignment) -> list[float]:
    time = one.time
    return [round(part, DIGITS) for part in (time.wait, time.download, time.train, time.upload)]
