"""A queue of clients' replies in virtual time."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.core.client_order import natural_order


@dataclass(frozen=True)
class Assignment:
    """A client that trains for the request of one round, which is the version of its initial model."""

    client: str
    version: int
    asked_at: float
    time: ClientTime

    @property
    def replies_at(self) -> float:
        return self.asked_at + self.time.total


@dataclass
class EventQueue:
    """Replies ordered by arrival time; ties by the clients' natural order, so that the order is
    deterministic."""

    _heap: list[tuple[float, tuple[int, int | str], Assignment]] = field(default_factory=list)

    @classmethod
    def of(cls, assignments: Iterable[Assignment]) -> "EventQueue":
        queue = cls([_entry(one) for one in assignments])
        heapify(queue._heap)
        return queue

    def add(self, assignment: Assignment) -> None:
        heappush(self._heap, _entry(assignment))

    @property
    def next_at(self) -> float:
        """The time of the next reply; infinity if no client is busy."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Assignment:
        return heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


def _entry(one: Assignment) -> tuple[float, tuple[int, int | str], Assignment]:
    return one.replies_at, natural_order(one.client), one
