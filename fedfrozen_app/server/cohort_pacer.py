"""Buffered pacing of masked sums: cohorts of clients that start together from one version of the model.

Masks cancel only in the sum over their cohort, so a buffer of masked updates is one cohort: `pacing.buffer`
clients that get their requests at the same time. Several cohorts train concurrently, and the server steps
whenever one of them finishes. Cohorts do not wait for each other; a cohort waits for its slowest client.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.server.pacer import Ask, ClosedRound, Pacer, replies_of_a_step
from fedfrozen_app.server.sampling import cohort_size, draw_more


@dataclass
class CohortPacer(Pacer):
    """Paces cohorts. No client is in two sums of one version: their difference could be one update."""

    cohorts: list[tuple[str, ...]] = field(default_factory=list)  # in training, in the order of their start

    @property
    def kind(self) -> str:
        return "cohorts"

    def run_round(self, number: int, population: Sequence[str], ask: Ask) -> ClosedRound:
        closed = ClosedRound()
        places = self.config.concurrency or cohort_size(self.participation, len(population))
        size = replies_of_a_step(self.config, places)
        most = max(1, places // size)
        free = [client for client in population if client not in self.at_work]
        draws = 0
        while not closed.used:
            while len(self.cohorts) < most and len(free) >= size:
                chosen = draw_more(free, size, self.seed, number, draws)
                draws += 1
                for client in chosen:
                    del free[bisect_left(free, natural_order(client), key=natural_order)]
                self._begin_cohort(ask(chosen, self.now), closed)
            if not self.cohorts:  # fewer clients are left than a cohort needs
                break
            ended = self._end_cohort(number, closed)
            for one in ended:
                if one.version != number:
                    insort(free, one.client, key=natural_order)
        return closed

    def _begin_cohort(self, asked: Sequence[Assignment], closed: ClosedRound) -> None:
        self.cohorts.append(tuple(one.client for one in asked))
        self.at_work |= {one.client: one for one in asked}
        closed.asked.extend(asked)

    def _end_cohort(self, number: int, closed: ClosedRound) -> list[Assignment]:
        """Let the next cohort finish; at equal times, the one that started first."""
        cohort = min(self.cohorts, key=self._ends_at)
        self.now = max(self.now, self._ends_at(cohort))
        ended = self.remove(cohort[0])
        (closed.dropped if self.is_dropped(ended[0], number) else closed.used).extend(ended)
        return ended

    def _ends_at(self, cohort: tuple[str, ...]) -> float:
        return max(self.at_work[client].replies_at for client in cohort)

    def remove(self, client: str) -> list[Assignment]:
        """Free its whole cohort: without one of its clients there is no sum."""
        (cohort,) = (one for one in self.cohorts if client in one)
        self.cohorts.remove(cohort)
        return [self.at_work.pop(one) for one in cohort]

    def most_requests(self, rounds: int) -> int | None:
        return rounds

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"cohorts": [list(cohort) for cohort in self.cohorts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.cohorts = [tuple(cohort) for cohort in state["cohorts"]]
