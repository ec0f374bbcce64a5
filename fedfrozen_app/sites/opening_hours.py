"""`availability` in a site's policy: the hours in which it trains, by its own clock.

    availability: ["Mon-Fri 19:00-07:00", "Sat,Sun 00:00-24:00"]

An interval belongs to the days on which it begins, and may end on the next morning. Without days it applies
to every day. Outside these hours a request waits and the reply says when the site opens; work in progress
continues.
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY, WEEK = 24 * 60, 7 * 24 * 60  # minutes
INTERVAL = re.compile(r"(?:([A-Za-z,-]+) )?(\d\d):(\d\d)-(\d\d):(\d\d)")
HOW = "give intervals such as [Mon-Fri 19:00-07:00, 'Sat,Sun 00:00-24:00']"


def checked_hours(value: Any, path: Path) -> tuple[str, ...]:
    """Check a list of intervals (`UserError`). If it is empty, the site always trains."""
    try:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError("it is no list of words")
        for one in value:
            _spans(one)
    except ValueError as error:
        raise UserError(f"{path}: availability: {error}: {HOW}.") from None
    return tuple(value)


def opens_at(intervals: Sequence[str], now: datetime.datetime | None = None) -> datetime.datetime | None:
    """When the site opens next, by its own clock; None while it is open."""
    now = now or datetime.datetime.now()
    spans = [span for one in intervals for span in _spans(one)]
    minute = now.weekday() * DAY + now.hour * 60 + now.minute
    if not spans or any((minute - first) % WEEK < length for first, length in spans):
        return None
    wait = min((first - minute) % WEEK for first, _ in spans)
    return now.replace(second=0, microsecond=0) + datetime.timedelta(minutes=wait)


def seconds_until(moment: datetime.datetime) -> float:
    """Seconds until then, also across a change of daylight saving time: both are read in the local time
    zone."""
    return max(1.0, moment.timestamp() - datetime.datetime.now().timestamp())


def _spans(interval: str) -> list[tuple[int, int]]:
    """(minute of the week at which it begins, minutes), one for each of its days."""
    if (found := INTERVAL.fullmatch(interval)) is None:
        raise ValueError(f"{interval!r} is no interval")
    days, *clock = found.groups()
    hour, minute, to_hour, to_minute = map(int, clock)
    first, last = hour * 60 + minute, to_hour * 60 + to_minute
    if minute > 59 or to_minute > 59 or first >= DAY or last > DAY or first == last:
        raise ValueError(f"{interval!r} names no time of the day, or none that passes")
    length = (last - first) % DAY or DAY
    return [(day * DAY + first, length) for day in _days(days)]


def _days(words: str | None) -> list[int]:
    if words is None:
        return list(range(7))
    found = []
    for part in words.split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise ValueError(f"{part!r} names no days ({', '.join(DAYS)})")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found += [day % 7 for day in range(begin, end + 1 if end >= begin else end + 8)]
    return found
