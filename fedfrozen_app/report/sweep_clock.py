"""The progress of a sweep, read by the current run's bar, so that one bar shows the whole sweep."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class SweepClock:
    def __init__(self, runs: int, now: Callable[[], float] = time.monotonic) -> None:
        self.runs = runs
        self.done = 0
        self._worked = 0  # finished runs that were run here, not kept from before
        self._now = now
        self._began = now()

    def finish(self, *, kept: bool = False) -> None:
        self.done += 1
        self._worked += not kept

    def place(self) -> str:
        return f"run {min(self.done + 1, self.runs)}/{self.runs}"

    def left(self, share: float) -> float | None:
        """Seconds until all runs end, with `share` of the current run done; None if nothing is done yet."""
        worked = self._worked + share
        if worked <= 0:
            return None
        return (self._now() - self._began) / worked * max(self.runs - self.done - share, 0)


SWEEP: ContextVar[SweepClock | None] = ContextVar("sweep", default=None)


@contextmanager
def over_all_runs(runs: int) -> Iterator[SweepClock]:
    clock = SweepClock(runs)
    token = SWEEP.set(clock)
    try:
        yield clock
    finally:
        SWEEP.reset(token)


def run_ended(*, kept: bool = False) -> None:
    """Count a completed or failed run; does nothing outside of a sweep."""
    if (clock := SWEEP.get()) is not None:
        clock.finish(kept=kept)
