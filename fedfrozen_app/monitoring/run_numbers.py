"""Metrics from a run's folder; each row is read once."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.files import lease
from fedfrozen_app.files.presence import STATES, read_presence
from fedfrozen_app.files.rows import FILE
from fedfrozen_app.monitoring.families import Collected

WAYS = ("up", "down")
PHASES = ("train", "aggregate", "evaluate", "total")


@dataclass
class RunNumbers:
    """Metrics of one run. `name`: its label, which sites use too."""

    name: str
    folder: Path
    rounds: int | None  # planned
    going: bool = True  # the SuperLink has not finished it
    seconds: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    replies: Counter[str] = field(default_factory=Counter)
    discarded: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # the last row
    _place: int = 0  # bytes of metrics.jsonl that are read

    def follow(self) -> None:
        """Read new rows. A file that got shorter belongs to a run that restarted or went back to a
        checkpoint."""
        path = self.folder / FILE
        try:
            size = path.stat().st_size
            if size < self._place:
                self.__init__(self.name, self.folder, self.rounds, self.going)  # type: ignore[misc]
            if size == self._place:
                return
            with path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except OSError:  # not written yet
            return
        whole = content.rpartition(b"\n")[0]
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, AttributeError):  # `fedfrozen verify` reports damage
                continue
        self._place += len(whole) + 1 if whole else 0

    def _take(self, row: dict[str, Any]) -> None:
        self.last = row
        spent = row.get("seconds") or {}
        self.seconds.update({phase: float(spent.get(phase) or 0.0) for phase in PHASES})
        self.traffic.update({way: int(row.get(f"bytes_{way}") or 0) for way in WAYS})
        self.replies.update(_replies(row))
        self.discarded += "discarded" in row

    def collect(self, found: Collected) -> None:
        self.follow()
        run, row = self.name, self.last
        for phase, seconds in self.seconds.items():
            found.add("fedfrozen_run_seconds", seconds, run=run, phase=phase)
        for way, size in self.traffic.items():
            found.add("fedfrozen_run_bytes", size, run=run, way=way)
        for state, count in self.replies.items():
            found.add("fedfrozen_run_replies", count, run=run, state=state)
        found.add("fedfrozen_run_discarded_rounds", self.discarded, run=run)
        found.add("fedfrozen_run_rounds", self.rounds, run=run)
        if row:
            found.add("fedfrozen_run_round", row.get("round"), run=run)
            written = (self.folder / FILE).stat().st_mtime
            found.add("fedfrozen_run_last_round_timestamp_seconds", written, run=run)
        if not self.going:  # the following metrics are current values
            return
        for state, count in _replies(row).items():
            found.add("fedfrozen_run_last_replies", count, run=run, state=state)
        found.add("fedfrozen_run_alive", lease.lost(self.folder) is None, run=run)
        presence = read_presence(self.folder)
        for site in presence.sites if presence is not None else ():
            for state in STATES:
                found.add("fedfrozen_run_site", site.state == state, run=run, site=site.name, state=state)


def _replies(row: dict[str, Any]) -> dict[str, int]:
    taken, aside = int(row.get("clients_ok") or 0), int(row.get("clients_failed") or 0)
    return {"taken": taken, "set aside": aside}
