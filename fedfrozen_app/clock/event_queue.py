"""Which client replies when: a queue of events in virtual time."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.core.client_order import natural_order


@dataclass(frozen=True)
class Assignment:
    """A client at work on the request of one round, which is the version of the model it started from."""

    client: str
    version: int
    asked_at: float
    time: ClientTime

    @property
    def replies_at(self) -> float:
        return self.asked_at + self.time.total


@dataclass
class EventQueue:
    """Replies by the time at which they arrive; of equal times by the clients' natural order, so that no draw
    and no machine decides."""

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
        """When the next reply arrives; infinity where nobody is at work."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Assignment:
        return heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


def _entry(one: Assignment) -> tuple[float, tuple[int, int | str], Assignment]:
    return one.replies_at, natural_order(one.client), one
