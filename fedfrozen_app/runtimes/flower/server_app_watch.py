"""Detect that the process that Flower started for a run has died: Flower itself takes a minute.

The command runs on the server's machine, where that process holds the lease of the run's folder.
"""

import logging
import time
from pathlib import Path

from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.core.formatting import clock_time
from fedfrozen_app.files import lease, status

log = logging.getLogger(__name__)
CERTAIN = 3.0  # seconds: its last lines may still arrive
BEGINS = 60.0  # seconds in which Flower starts the process


class ServerAppLost(RunFailed):
    """The run's process ended without reporting a result."""


class ServerAppWatch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._missed: float | None = None  # the time since when it is missing
        self._seen = False

    def check(self) -> None:
        """Raises once the process is certainly gone."""
        now = time.monotonic()
        self._warn_of_pending(now)
        owner = lease.lost(self._folder)
        known = status.read(self._folder) if owner is not None else None
        if owner is None or known is None or (known.pid, known.began) != (owner.pid, owner.began):
            self._missed = None  # or of an earlier attempt, which this run will replace
            return
        self._missed = self._missed or now
        if now - self._missed >= CERTAIN:
            moment = clock_time(self._missed - now)
            raise ServerAppLost(
                f"The run's server app (process {owner.pid}) was killed at about {moment}, by somebody or "
                "for want of memory."
            )

    def _warn_of_pending(self, now: float) -> None:
        self._seen = self._seen or (self._folder / lease.FILE).exists()
        if not self._seen and now - self._began >= BEGINS:
            self._seen = True
            log.warning(
                "No process has taken up the run for %.0f s: does the server's SuperExec (superexec.sh) run?",
                BEGINS,
            )
