"""Sites outside their opening hours (`availability` in their policy), to be contacted when they open."""

import logging
import time
from dataclasses import dataclass, field

from fedfrozen_app.core.formatting import clock_time

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 1.0, 8 * 24 * 3600.0  # allowed seconds until a site opens: its hours repeat weekly


@dataclass
class ClosedSites:
    _until: dict[str, float] = field(default_factory=dict)  # by client, on the monotonic clock
    _opens: dict[str, str] = field(default_factory=dict)  # the same as local time, for messages

    def close(self, client: str, title: str, seconds: float) -> None:
        """Note that the site opens in `seconds`."""
        seconds = min(max(seconds, SHORTEST), LONGEST)
        self._until[client] = time.monotonic() + seconds
        self._opens[client] = clock_time(seconds)
        log.info("%s is outside its opening hours: it is asked again at %s.", title, self._opens[client])

    def is_closed(self, client: str) -> bool:
        return time.monotonic() < self._until.get(client, 0.0)

    def sentence(self, client: str) -> str:
        """A status text for the operator; empty if the site is open."""
        if not self.is_closed(client):
            return ""
        return f"It is outside its opening hours, and is asked again at {self._opens[client]}."
