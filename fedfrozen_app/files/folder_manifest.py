"""`manifest.jsonl`: the kind of a folder (a run or a sweep), and the digest of every completed file in it.

The file is a journal: a line is added just before a file is moved into place, and each line starts with the
CRC-32 of its text, which distinguishes intact, truncated and damaged lines. A kill can only come between the
last line and the file that it announces: until another line follows, the earlier file counts as intact too.

    {"is": "run", "digest": ..., "overrides": [...]}          the folder's kind
    {"file": NAME, "sha256": ..., "size": ..., "mtime_ns": ...}   a completed file
    {"gone": NAME}                                            a file that was removed
    {"rows": [...]}, {"row": ...}                             digests of the lines of metrics.jsonl
    {"end": true}                                             all files are written
"""

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedfrozen_app.files.append import append

FILE = "manifest.jsonl"
RUN, SWEEP = "run", "sweep"
AT_END = "summary.json"
ROW_DIGITS = 16  # of a row's digest: enough against accidental damage
# Rewritten during a run, by several processes; the first has its own seal, rows have one digest each.
UNRECORDED = ("status.json", "lease.json", "stop.request", "metrics.jsonl", FILE)


class Entry(NamedTuple):
    """The record of a completed file."""

    sha256: str
    size: int
    mtime_ns: int


@dataclass
class Manifest:
    header: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    rows: list[str] | None = None  # None: not recorded
    # What the last line replaces: (name, entry or None), or ("", earlier rows). A kill may have left it in
    # place.
    before: tuple[str, Any] | None = None
    ended: bool = False  # all rows are written, and nothing has started since
    damage: str = ""  # "" if every line is intact

    @property
    def kind(self) -> str:
        return str(self.header.get("is", ""))

    def may_be(self, name: str) -> list[Entry | None]:
        """The states that the file may have; None: absent."""
        last = [self.before[1]] if self.before is not None and self.before[0] == name else []
        return [self.files.get(name), *last]


def read(folder: Path) -> Manifest | None:
    """Read the manifest; None if there is none (no run or sweep, or an older version). Raises `OSError`."""
    try:
        content = (folder / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = Manifest()
    *whole, rest = content.split(b"\n")
    for number, line in enumerate(whole, start=1):
        record = _record(line)
        if record is None:
            found.damage = found.damage or f"line {number} is not as it was written"
            continue
        _take(found, record)
    if not found.damage and not found.header:
        found.damage = "it is empty" if not content else "its first line is missing"
    if rest and found.header and _record(rest) is not None:  # truncated just before the line break
        _take(found, _record(rest) or {})
    elif rest and (found.kind == SWEEP or (folder / AT_END).is_file()):
        # Unlikely after a kill: an active run has no such file, and a sweep adds few lines.
        found.damage = found.damage or "its end is missing"
    return found


def kind(folder: Path) -> str:
    """ "run", "sweep" or "", from the first line alone, so that listing many folders is fast."""
    try:
        with (folder / FILE).open("rb") as file:
            first = _record(file.readline().removesuffix(b"\n"))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if first is not None and "is" in first:
        return str(first["is"])
    found = read(folder)
    return "" if found is None else found.kind


def is_recorded(folder: Path) -> bool:
    return (folder / FILE).is_file()


def begin(folder: Path, kind: str, **details: Any) -> None:
    """Record the folder's kind. Earlier records are kept until their files are replaced."""
    _mend_end(folder / FILE)
    _add(folder, {"is": kind, **details})


def note_file(path: Path, content: Path) -> None:
    """Record that `content` is about to replace `path`."""
    if path.name not in UNRECORDED and is_recorded(path.parent):
        _add(path.parent, {"file": path.name, **entry_of(content)._asdict()})


def note_back(path: Path) -> None:
    """Record that the file announced by the last line was not replaced after all."""
    if path.name not in UNRECORDED and (found := read(path.parent)) is not None:
        before = found.before[1] if found.before is not None and found.before[0] == path.name else None
        _add(path.parent, {"file": path.name, **before._asdict()} if before else {"gone": path.name})


def note_gone(path: Path) -> None:
    """Record that the file is about to be removed."""
    if path.name not in UNRECORDED and is_recorded(path.parent):
        _add(path.parent, {"gone": path.name})


def note_row(folder: Path, line: str) -> None:
    """Record a line added to metrics.jsonl. Not synced, as the line itself is not: readers accept a last line
    without a record."""
    if is_recorded(folder):
        _add(folder, {"row": row_digest(line.encode())}, sync=False)


def note_rows(folder: Path, lines: Iterable[str]) -> None:
    """Record that metrics.jsonl is about to hold exactly these lines."""
    if is_recorded(folder):
        _add(folder, {"rows": [row_digest(line.encode()) for line in lines]})


def note_end(folder: Path) -> None:
    """Record that the last announced file is in place."""
    if is_recorded(folder):
        _add(folder, {"end": True})


def rewrite(folder: Path, found: Manifest) -> None:
    """Replace a damaged journal by a new one with the known records."""
    lines = [_line(found.header)]
    lines += [_line({"file": name, **entry._asdict()}) for name, entry in found.files.items()]
    if found.rows is not None:
        lines.append(_line({"rows": found.rows}))
    part = folder / f".{FILE}.part"
    lines.append(_line({"end": True}))
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(folder / FILE)


def entry_of(path: Path) -> Entry:
    state = path.stat()
    return Entry(file_digest(path), state.st_size, state.st_mtime_ns)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def row_digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:ROW_DIGITS]


def _add(folder: Path, record: dict[str, Any], *, sync: bool = True) -> None:
    append(folder / FILE, _line(record), sync=sync)


def _line(record: dict[str, Any]) -> str:
    text = json.dumps(record)
    return f"{zlib.crc32(text.encode()):08x} {text}"


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is damaged."""
    check, _, text = line.partition(b" ")
    if check != f"{zlib.crc32(text):08x}".encode():
        return None
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _take(found: Manifest, record: dict[str, Any]) -> None:
    found.before = None
    if not {"file", "gone"} & record.keys():  # later verbs write files too
        found.ended = "end" in record
    if "is" in record:
        found.header = record
    elif "gone" in record:
        found.before = (record["gone"], found.files.pop(record["gone"], None))
    elif "file" in record:
        name = record["file"]
        found.before = (name, found.files.get(name))
        found.files[name] = Entry(record["sha256"], record["size"], record["mtime_ns"])
    elif "rows" in record:
        found.before = ("", found.rows)
        found.rows = list(record["rows"])
    elif "row" in record and found.rows is not None:
        found.rows.append(record["row"])


def _mend_end(path: Path) -> None:
    """If a kill truncated the last line, start the next record on a new line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if content and not content.endswith(b"\n"):
        whole = content.rpartition(b"\n")[0]
        with path.open("rb+") as file:
            file.truncate(len(whole) + (1 if whole else 0))
