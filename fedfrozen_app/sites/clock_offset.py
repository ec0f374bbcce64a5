"""How far this machine's clock is from the server's, in a file of the meeting folder.

A server refuses a SuperNode whose clock is ahead, and then no process is there that could be asked: Flower
ends it without a word. `fedfrozen site metrics` reads the offset from this file, and the log has a sentence.
"""

import json
import logging
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

log = logging.getLogger(__name__)
NAME = "clock.json"
WRONG = 30.0  # seconds from which Flower's limits are near: as in the alert
LASTS = 120.0  # seconds for which the offset is that of now


class ClockFile:
    """Written by the SuperNode at each answer whose date says something new."""

    def __init__(self, meeting: Path) -> None:
        self._path = meeting / NAME
        self._last: tuple[float, float] | None = None  # offset, and when it was written (monotonic clock)

    def note(self, offset: float) -> None:
        now = time.monotonic()
        if self._last is not None and abs(offset - self._last[0]) < WRONG and now - self._last[1] < LASTS / 4:
            return
        if abs(offset) > WRONG:
            way = "ahead of" if offset > 0 else "behind"
            log.error(
                "This machine's clock is %.0f s %s the server's, which then refuses its requests: set one of "
                "them by NTP.",
                abs(offset),
                way,
            )
        self._last = offset, now
        part = self._path.with_suffix(".part")
        try:
            part.write_text(json.dumps({"offset": offset, "measured": now}))
            part.replace(self._path)
        except OSError:  # a full disk has an alert of its own
            part.unlink(missing_ok=True)


def offset_of(date: str | None) -> float | None:
    """From the Date of the server's proxy, to a second; None without one that can be read."""
    try:
        return None if date is None else time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def last_offset(meeting: Path) -> float | None:
    """In seconds; None if nothing was measured lately."""
    try:
        found = json.loads((meeting / NAME).read_text())
        offset, age = float(found["offset"]), time.monotonic() - float(found["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return offset if 0 <= age < LASTS else None
