"""The site's own record of what was asked, sent and refused: one JSON line each, only ever appended.

Each line holds its own SHA-256 and that of the line before, so that a line removed or changed later shows.
"""

import datetime
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedfrozen_app.errors import UserError

FIRST = "0" * 64


class AuditLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = read_audit(path)
        self._last = entries[-1]["digest"] if entries else FIRST
        self._sent = [entry["time"] for entry in entries if _is_new(entry)]

    def write(self, event: str, **details: Any) -> None:
        """On the disk when this returns: what is sent is on record before it is sent."""
        entry = {"time": _now().isoformat(), "event": event, **details, "previous": self._last}
        entry["digest"] = _digest(entry)
        line = (json.dumps(entry) + "\n").encode()
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            whole = os.fstat(handle).st_size
            try:
                if os.write(handle, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, whole)  # half a line would break the chain for good
                raise
        finally:
            os.close(handle)
        self._last = entry["digest"]
        if _is_new(entry):
            self._sent.append(entry["time"])

    def sent_today(self) -> int:
        """Updates sent in the last 24 hours; one that was sent again counts once."""
        since = (_now() - datetime.timedelta(days=1)).isoformat()
        self._sent = [time for time in self._sent if time >= since]
        return len(self._sent)

    def has_sent(self, run: str, order: str) -> bool:
        """Whether this very order of the run was answered before; looked up in the file, as it is rare."""
        wanted = ("sent", run, order)
        return any((e["event"], e.get("run"), e.get("order")) == wanted for e in read_audit(self.path))


def read_audit(path: Path) -> list[dict[str, Any]]:
    """Every entry, checked; a `UserError` where the chain is broken."""
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = []
    last = FIRST
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        try:
            entry = json.loads(line)
            content = {key: value for key, value in entry.items() if key != "digest"}
            sound = entry["previous"] == last and entry["digest"] == _digest(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise UserError(
                f"The audit log {path} was changed or cut at line {number}: keep it as it is, move it away, "
                "and find out why before this site goes on."
            )
        entries.append(entry)
        last = entry["digest"]
    return entries


def _is_new(entry: dict[str, Any]) -> bool:
    return entry["event"] == "sent" and not entry.get("again")


def _digest(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
