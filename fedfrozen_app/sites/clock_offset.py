"""The offset of this machine's clock from the server's, in a file of the meeting folder.

A server refuses a SuperNode whose clock is ahead, and Flower then ends the process silently, so that no
process is left to query. `fedfrozen site metrics` reads the offset from this file, and the log has a
sentence.
"""

import json
import logging
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

log = logging.getLogger(__name__)
NAME = "clock.json"
WRONG = 30.0  # seconds: near Flower's limits, and the threshold of the alert
LASTS = 120.0  # seconds for which a measured offset counts as current


class ClockFile:
    """Written by the SuperNode whenever a response's date shows a new offset."""

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
    """The offset by a response's Date header, to a second; None if it is missing or unreadable."""
    try:
        return None if date is None else time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def last_offset(meeting: Path) -> float | None:
    """The last offset in seconds; None if none was measured recently."""
    try:
        found = json.loads((meeting / NAME).read_text())
        offset, age = float(found["offset"]), time.monotonic() - float(found["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return offset if 0 <= age < LASTS else None
