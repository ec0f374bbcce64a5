"""A round under buffered pacing whose updates are masked: the sum of one cohort enters it.

A cohort exchanges keys, trains and unmasks its sum when it gets its requests, because its bytes, including
keys, determine how long it takes; the sum is kept until its arrival in virtual time. A cohort below its
threshold has no sum: the round in which it would arrive changes nothing, and its clients are idle again.
"""

import logging
from collections.abc import Mapping, Sequence

from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.server.late_sums import LateSum
from fedfrozen_app.server.masked_training import masked_round
from fedfrozen_app.server.paced_round import PacedRound

log = logging.getLogger(__name__)


class MaskedPacedRound(PacedRound):
    def _population(self, nodes: Mapping[str, int]) -> Sequence[str]:
        population = super()._population(nodes)
        spoilers = self.strategy.federation.sums.spoilers
        if not spoilers:
            return population
        return self.strategy.federation.without_spoilers(list(population))

    def _ask(self, clients: Sequence[str], at: float) -> list[Assignment]:
        """Run one cohort: compute its masked sum, and its times from the bytes sent."""
        federation, traffic = self.strategy.federation, self.record.traffic
        members = [(client, self._nodes[client]) for client in clients]
        masked = masked_round(self.strategy, self.request, members, self.arrays, traffic)
        masked.run()
        self.record.spent |= masked.spent
        for client, why in masked.spoilt_by.items():
            federation.sums.spoilers.add(client)
            log.warning("Round %d: client %s %s, so that no sum could be unmasked.", self.number, client, why)
        assignments = [self._masked_assignment(client, at) for client in clients]
        late = LateSum.of(masked.result, [traffic.postpone(client) for client in clients])
        self.pacing.sums.keep(clients, late)
        return assignments

    def _masked_assignment(self, client: str, at: float) -> Assignment:
        """The assignment of a client, timed for the whole plan: its choice of layers is not known."""
        assert self.record.traffic.by_client is not None
        down, up = self.record.traffic.by_client.get(client, (0, 0))
        return Assignment(client, self.number, at, self.pacing.times.of(client, self._plan, down, up, at))

    def _collect_masked(self) -> None:
        used, dropped = _first(self.closed.used), [one.client for one in self.closed.dropped]
        for client in dropped:
            if client in self.pacing.sums:
                self.record.traffic.arrived(client, self.pacing.sums.pop(client).upload)
        if used is None:
            self.record.discarded = "fewer clients are left than pacing.buffer says"
            return
        late = self.pacing.sums.pop(used.client)
        self.record.traffic.arrived(used.client, late.upload)
        weight = self.pacing.weight(self.number - used.version)
        self.record.take_masked(late.aged(weight, self.request.sent_names))


def _first(cohort: Sequence[Assignment]) -> Assignment | None:
    """The client under which its cohort's sum is stored."""
    return min(cohort, key=lambda one: natural_order(one.client), default=None)
