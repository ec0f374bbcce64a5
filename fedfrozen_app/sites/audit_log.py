"""The site's own record of what was asked, sent and refused: one JSON line per event, append-only.

Each line holds its own SHA-256 and that of the line before, so that a removed or changed line is detected.
To detect lines cut off at the end, the last digest (the log's head) goes with every reply, and the server
keeps it (`anchors.jsonl` in its run's folder). Each line also holds a random salt: without it, the server
could guess why a site refuses by hashing all likely times and reasons. A copy may go to syslog.
"""

import datetime
import hashlib
import json
import logging
import logging.handlers
import secrets
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.disk import append_line
from fedfrozen_app.sites.differencing import SumMemory

FIRST = "0" * 64
COUNTED = (
    *("sent", "again", "lacks", "hello", "pending", "refused", "failed", "declined", "judged"),
    "closed",  # asked outside its opening hours
    *("chose", "keys"),  # of a masked round
    *("census", "survival", "survival_masks"),
)


class AuditLog:
    def __init__(self, path: Path, syslog: str | None = None) -> None:
        self.path = path
        self._copy = None if syslog is None else syslog_handler(syslog)
        self.head = FIRST
        self.last: dict[str, Any] = {}  # the last line
        self._digests = {FIRST}
        self._times: dict[str, deque[str]] = defaultdict(deque)  # of counted events
        self.spending: dict[str, set[str]] = defaultdict(set)  # private run: rounds that were sent
        self.charges: dict[str, list[str]] = defaultdict(list)  # ask with noise: its budget entries
        self._answered: dict[tuple[str, str], set[str]] = defaultdict(set)  # run and proposal: requests
        self._confirmed: dict[tuple[str, int], list[str]] = {}  # run and round: the sites in its sum
        self._attempts: Counter[tuple[str, int]] = Counter()  # run and round: masked sessions started
        self.sums = SumMemory()
        for entry in read_audit(path):
            self._learn(entry)

    def write(self, event: str, **details: Any) -> None:
        """Write a line to the disk before returning, so that whatever leaves the site is recorded first."""
        entry = {"time": _now().isoformat(), "event": event, **details}
        entry |= {"salt": secrets.token_hex(16), "previous": self.head}
        entry["digest"] = _digest(entry)
        append_line(self.path, json.dumps(entry))
        self._learn(entry)
        if self._copy is not None:
            # The digests of a large model's arrays would be more than a datagram holds.
            text = json.dumps({key: value for key, value in entry.items() if key != "arrays"})
            self._copy.emit(logging.LogRecord("fedfrozen", logging.INFO, "", 0, text, (), None))

    def _learn(self, entry: dict[str, Any]) -> None:
        self.head, self.last = entry["digest"], entry
        self._digests.add(self.head)
        event = "again" if entry.get("again") else entry["event"]
        if event in COUNTED:
            self._times[event].append(entry["time"])
        if entry["event"] == "keys":
            self._attempts[entry["run"], entry["round"]] += 1
        if entry["event"] == "confirmed":
            self._confirmed[entry["run"], entry["round"]] = entry["survivors"]
            self.sums.learn(entry)
        if entry["event"] in ("census", "survival") and entry.get("epsilon") is not None:
            self.spending[entry["charged"]].add("1")
            self.charges[entry["proposal"]].append(entry["charged"])
        if entry["event"] == "sent":
            self._answered[entry.get("run", ""), entry.get("proposal", "")].add(entry.get("order", ""))
            if entry.get("epsilon") is not None:
                self.spending[entry["run"]].add(str(entry["round"]))

    def holds(self, digest: str) -> bool:
        """Whether this digest was once the log's head."""
        return digest in self._digests

    def today(self, *events: str) -> int:
        """The number of these events in the last 24 hours; an update that is sent again is `again`,
        not `sent`."""
        since = (_now() - datetime.timedelta(days=1)).isoformat()
        for event in events:
            times = self._times[event]
            while times and times[0] < since:
                times.popleft()
        return sum(len(self._times[event]) for event in events)

    def confirmed(self, run: str, server_round: int) -> list[str] | None:
        """The sites that this site has confirmed for the sum of a round; None if it has not yet."""
        return self._confirmed.get((run, server_round))

    def attempts(self, run: str, server_round: int) -> int:
        """How often this site has sent keys for the masks of a round."""
        return self._attempts[run, server_round]

    def has_sent(self, run: str, proposal: str, request: str) -> bool:
        """Whether an update for this request was sent before, under this proposal."""
        return request in self._answered[run, proposal]

    def updates(self, run: str, proposal: str) -> int:
        """The number of different requests of the run, under this proposal, that were answered."""
        return len(self._answered[run, proposal])


def read_audit(path: Path) -> list[dict[str, Any]]:
    """Every entry, checked; `UserError` if the chain is broken."""
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = []
    last = FIRST
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        entry = read_entry(line, last)
        if entry is None:
            raise UserError(
                f"The audit log {path} was changed or cut at line {number}: keep it as it is, move it away, "
                "and find out why before this site goes on."
            )
        entries.append(entry)
        last = entry["digest"]
    return entries


def read_entry(line: str, last: str) -> dict[str, Any] | None:
    """The entry of a line after the one with the digest `last`; None if it was changed or is another."""
    try:
        entry = json.loads(line)
        content = {key: value for key, value in entry.items() if key != "digest"}
        sound = entry["previous"] == last and entry["digest"] == _digest(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return entry if sound else None


def check_anchors(path: Path, site: str, anchors: Path) -> int:
    """The number of digests of this site in a server's `anchors.jsonl`; `UserError` if the log lacks one."""
    held = {FIRST, *(entry["digest"] for entry in read_audit(path))}
    try:
        lines = anchors.read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        own = [(record["time"], record["digest"]) for record in records if record["site"] == site]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{anchors} is no server's anchors.jsonl ({error}): give one of a run.") from error
    for time, digest in own:
        if digest not in held:
            raise UserError(
                f"The audit log {path} and {anchors} disagree: the server was told of an entry, at {time}, "
                "that the log does not hold. It was shortened or replaced: find out why before this site "
                "goes on."
            )
    return len(own)


def syslog_handler(address: str) -> logging.handlers.SysLogHandler:
    """To a socket such as /dev/log, or to HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not address.startswith("/") and not (colon and port.isdigit()):
        raise UserError(f"syslog: {address} is neither a socket such as /dev/log nor HOST:PORT.")
    try:
        return logging.handlers.SysLogHandler(address if address.startswith("/") else (host, int(port)))
    except OSError as error:
        raise UserError(f"syslog: {address} cannot be reached ({error}): correct it in site.yaml.") from error


def _digest(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
