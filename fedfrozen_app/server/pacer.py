"""When requests are sent and when a round closes, in virtual time: the rule of each `pacing`.

A pacer decides from the clients' times alone, never from their replies, so that a run's order of events
depends only on its seed and settings, not on the machine. Replies are in `late_replies.py`.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment, EventQueue
from fedfrozen_app.config import PacingConfig
from fedfrozen_app.core.client_order import natural_order
from fedfrozen_app.server.sampling import cohort_size, draw_cohort, draw_more

# Sends clients the round's request at a given time; returns their assignments.
Ask = Callable[[Sequence[str], float], Sequence[Assignment]]
ROUNDING = 1e-9  # 0.56 · 25 is more than 14 in floating point


@dataclass
class ClosedRound:
    """The events of a round until the server's step."""

    asked: list[Assignment] = field(default_factory=list)
    used: list[Assignment] = field(default_factory=list)  # replies that enter the step, of any version
    dropped: list[Assignment] = field(default_factory=list)  # replies that came too late


@dataclass
class Pacer(ABC):
    config: PacingConfig
    seed: int
    participation: float = 1.0
    now: float = 0.0  # virtual seconds
    at_work: dict[str, Assignment] = field(default_factory=dict)  # by client

    @abstractmethod
    def run_round(self, number: int, population: Sequence[str], ask: Ask) -> ClosedRound:
        """Send requests and wait for replies until the server's step `number`. `population`: all clients, in
        natural order."""

    @abstractmethod
    def most_requests(self, rounds: int) -> int | None:
        """The largest number of requests that a client may get in `rounds` rounds, whoever else is drawn;
        None: the rounds for which it is drawn."""

    @property
    def kind(self) -> str:
        """The name that identifies a checkpoint's state."""
        return self.config.name

    def remove(self, client: str) -> list[Assignment]:
        """Cancel a client's request; returns the assignments that end with it."""
        return [self.at_work.pop(client)]

    def is_dropped(self, assignment: Assignment, number: int) -> bool:
        """Whether its reply is too old for the server's step `number`."""
        staleness, most = number - assignment.version, self.config.max_staleness
        if staleness and not self.uses_late:
            return True
        return most is not None and staleness > most

    @property
    def uses_late(self) -> bool:
        return self.config.name != "deadline" or self.config.late == "use"

    def _begin(self, asked: Iterable[Assignment], queue: EventQueue, closed: ClosedRound) -> None:
        for one in asked:
            self.at_work[one.client] = one
            queue.add(one)
            closed.asked.append(one)

    def _end(self, queue: EventQueue, number: int, closed: ClosedRound) -> Assignment:
        """Let the next reply arrive."""
        one = queue.pop()
        del self.at_work[one.client]
        self.now = max(self.now, one.replies_at)  # it may have arrived while the last round closed
        (closed.dropped if self.is_dropped(one, number) else closed.used).append(one)
        return one

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: JSON preserves every float exactly."""
        return {
            "name": self.kind,
            "now": self.now,
            "at_work": list(map(_plain, self.at_work.values())),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state["now"]
        found = (
            Assignment(client, version, asked, ClientTime(*time))
            for client, version, asked, time in state["at_work"]
        )
        self.at_work = {one.client: one for one in found}


def _plain(one: Assignment) -> list[Any]:
    time = one.time
    return [one.client, one.version, one.asked_at, [time.wait, time.download, time.train, time.upload]]


class DeadlinePacer(Pacer):
    """A round closes after `pacing.seconds`, or when `pacing.share` of the clients it asked have replied.

    A late client continues to train. It gets another request after it has replied. A round without idle
    clients waits for the next reply.
    """

    def run_round(self, number: int, population: Sequence[str], ask: Ask) -> ClosedRound:
        closed, queue = ClosedRound(), EventQueue.of(self.at_work.values())
        limit = self.now + (self.config.seconds or math.inf)
        drawn = draw_cohort(population, self.participation, self.seed, number)
        free = [client for client in drawn if client not in self.at_work]
        self._begin(ask(free, self.now) if free else (), queue, closed)
        wanted = math.ceil((self.config.share or 1.0) * len(closed.asked) - ROUNDING) or 1
        replied = 0
        # Include all replies of the same instant.
        while queue and queue.next_at <= limit and (replied < wanted or queue.next_at <= self.now):
            one = self._end(queue, number, closed)
            replied += one.version == number or not closed.asked
        if replied < wanted:
            self.now = limit
        return closed

    def most_requests(self, rounds: int) -> int | None:
        return None


class BufferedPacer(Pacer):
    """Keeps `pacing.concurrency` clients busy; steps after `pacing.buffer` replies (FedBuff, arXiv
    2106.06639).

    A client does not get two requests for the same version of the model: it would compute the same update
    again. If no other client is idle, its place stays empty until the next version.
    """

    def run_round(self, number: int, population: Sequence[str], ask: Ask) -> ClosedRound:
        closed, queue = ClosedRound(), EventQueue.of(self.at_work.values())
        places = self.config.concurrency or cohort_size(self.participation, len(population))
        wanted = replies_of_a_step(self.config, places)
        free = [client for client in population if client not in self.at_work]
        draws = 0
        while len(closed.used) < wanted:
            # Replies of the same instant all arrive before new requests are sent.
            if queue.next_at > self.now or not closed.used:
                count = min(places - len(self.at_work), len(free))
                if count > 0:
                    chosen = draw_more(free, count, self.seed, number, draws)
                    draws += 1
                    for client in chosen:
                        del free[bisect_left(free, natural_order(client), key=natural_order)]
                    self._begin(ask(chosen, self.now), queue, closed)
            one = self._end(queue, number, closed)
            if one.version != number:
                insort(free, one.client, key=natural_order)
        return closed

    def most_requests(self, rounds: int) -> int | None:
        return rounds


def replies_of_a_step(config: PacingConfig, at_work: int) -> int:
    """The size of the buffer while `at_work` clients are busy."""
    return config.buffer or max(1, at_work // 2)
