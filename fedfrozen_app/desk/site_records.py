"""The site's two logs, cached until a file changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.audit_log import read_audit

Entries = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """A hash-chained log. `problem`: why it cannot be trusted; it then has no entries."""

    entries: Entries = ()
    problem: str = ""

    @property
    def head(self) -> str:
        return str(self.entries[-1]["digest"]) if self.entries else ""


@dataclass
class Records:
    _read: dict[Path, tuple[tuple[int, int], Record]] = field(default_factory=dict)

    def of(self, path: Path) -> Record:
        try:
            state = path.stat()
        except FileNotFoundError:
            return Record()
        stamp = state.st_mtime_ns, state.st_size
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, _checked(path)
        return self._read[path][1]


def _checked(path: Path) -> Record:
    try:
        return Record(read_audit(path))
    except UserError as error:
        return Record(problem=str(error))
