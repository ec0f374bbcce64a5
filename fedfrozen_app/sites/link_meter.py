"""What a SuperNode measures of its link to the server: bytes, speed and delay."""

import threading
import time
from dataclasses import dataclass
from typing import Any

LARGE = 16 * 1024  # bytes: smaller pieces take too little time to measure the link's speed
FRESH = 120.0  # seconds for which a measured speed is reported


@dataclass(frozen=True)
class Speed:
    bytes_per_second: float
    measured: float  # time by the monotonic clock


class LinkMeter:
    """Counts since the process started. Pieces of a message travel in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = {"up": 0, "down": 0}
        self._speed: dict[str, Speed] = {}
        self._delay: float | None = None

    def transferred(self, way: str, size: int, seconds: float) -> None:
        """A piece of a message was sent (`up`) or received (`down`)."""
        with self._lock:
            self._bytes[way] += size
            if size >= LARGE and seconds > 0:
                self._speed[way] = Speed(size / seconds, time.monotonic())

    def asked(self, seconds: float) -> None:
        """The server was asked for messages: the smallest request there is."""
        self._delay = seconds

    def to_json(self) -> dict[str, Any]:
        now = time.monotonic()
        with self._lock:
            speed = {way: one for way, one in self._speed.items() if now - one.measured < FRESH}
            return {
                "bytes": dict(self._bytes),
                "speed": {way: one.bytes_per_second for way, one in speed.items()},
                "delay": self._delay,
            }
