"""Counts over a site's growing audit log: each line is read and checked once."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.audit_log import FIRST, read_entry

# The state of a reply, by the log's event. The reasons for not replying stay private: they could reveal how
# few rows a site has, and the server gets the same reply for all.
STATES = {
    "sent": "sent",
    "judged": "evaluated",
    "chose": "layers chosen",
    "keys": "masked",
    "confirmed": "masked",
    "unmasked": "masked",
    "lacks": "arrays asked for",
    "closed": "outside the hours",
    "hello": "joined",
    "pending": "approval asked for",
    "census": "counted",
    "survival": "counted",
    "survival_masks": "masked",
    "refused": "refused",
    "failed": "refused",
    "declined": "refused",
}


@dataclass
class AuditTail:
    path: Path
    replies: Counter[str] = field(default_factory=Counter)  # by state
    rounds: int = 0
    examples: int | None = None  # sent to the server with the last update
    bundle: str = ""  # of the last request
    sound: bool = True
    _last: str = FIRST
    _place: int = 0  # bytes read

    def follow(self) -> None:
        """Read new lines. A log that got shorter is read from the start again."""
        try:
            size = self.path.stat().st_size
            if size < self._place:
                self.__init__(self.path)  # type: ignore[misc]
            if size == self._place or not self.sound:
                return
            with self.path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except FileNotFoundError:  # nothing was asked yet
            return
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror or error}).") from error
        whole = content.rpartition(b"\n")[0]  # the last line may still be written
        for line in whole.splitlines():
            entry = read_entry(line.decode("utf-8", "replace"), self._last)
            if entry is None:
                self.sound = False
                return
            self._take(entry)
        self._place += len(whole) + 1 if whole else 0

    def _take(self, entry: dict[str, Any]) -> None:
        self._last = entry["digest"]
        event = entry["event"]
        state = "sent again" if entry.get("again") else STATES.get(event)
        if state is not None:
            self.replies[state] += 1
        if event == "sent":
            self.rounds += not entry.get("again")
            self.examples = int(entry["examples"])
        if entry.get("bundle"):
            self.bundle = str(entry["bundle"])
