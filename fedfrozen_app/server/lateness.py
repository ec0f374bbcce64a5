"""Warn the operator when a site's reply is late, and report when it arrives."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedfrozen_app.core.formatting import clock_time

log = logging.getLogger(__name__)
# A reply is late after: the minimum in seconds, the multiple of the slowest so far, and the seconds before
# there is one.
LATE, USUAL, FIRST = 15.0, 3.0, 60.0


@dataclass
class Lateness:
    """Decides when a reply is late, from the run's earlier replies."""

    slowest: float = 0.0  # the longest time of a reply without a warning
    awaited: "Awaited | None" = None  # the reply that the round waits for now
    at_work: dict[str, "Awaited"] = field(default_factory=dict)  # if no round waits: by client
    round: int = 0  # if no round waits: the current one

    @property
    def limit(self) -> float:
        return max(LATE, USUAL * self.slowest) if self.slowest else FIRST

    def of(self, client: str) -> "Awaited | None":
        if self.awaited is not None and self.awaited.client == client:
            return self.awaited
        return self.at_work.get(client)


@dataclass
class Awaited:
    """One awaited reply."""

    lateness: Lateness
    title: Callable[[], str]  # called only for warnings: a round may have thousands of replies
    round: int
    deadline: float  # as `began`, on the monotonic clock
    began: float
    client: str = ""
    troubled: bool = False  # the operator was warned: also report the end
    holds_up: bool = True  # whether the round waits for it

    @property
    def late_at(self) -> float:
        return float("inf") if self.troubled else self.began + self.lateness.limit

    @property
    def is_late(self) -> bool:
        return self.troubled or time.monotonic() >= self.late_at

    def warn(self, sentence: str) -> None:
        self.troubled = True
        log.warning("%s %s", self.title(), sentence)

    def warn_late(self) -> None:
        waited, until = time.monotonic() - self.began, clock_time(self.deadline - time.monotonic())
        what = f"The round waits for it until {until}."
        if not self.holds_up:
            what = f"No round waits for it, and its reply counts if it comes until {until}."
        self.warn(
            f"has not answered round {self.round} since {clock_time(-waited)} ({waited:.0f} s): it trains "
            f"longer than usual, or its executor, disk or network fails; the executor's log says which. "
            + what
        )

    def ended(self, *, answered: bool) -> None:
        waited = time.monotonic() - self.began
        if not answered:
            return  # the round logs why it was set aside
        if self.troubled:
            log.warning("%s answered round %d after %.0f s.", self.title(), self.round, waited)
        else:
            self.lateness.slowest = max(self.lateness.slowest, waited)
