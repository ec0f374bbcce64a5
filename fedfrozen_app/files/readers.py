"""One reader for each kind of file of a run: it returns what was written, or raises a one-sentence error.

Every file is checked against the folder's manifest: its size first, then its digest, because a flipped bit
keeps the size and may keep the time. A folder of an older version has no manifest: its files are read
unchecked.
"""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.disk import header
from fedfrozen_app.files.folder_manifest import Entry, Manifest

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs does not need it
    from torch import Tensor

TRIES = 4  # while another process replaces the file

# What can be done if a file is damaged or missing. RUN stands for the folder.
REPAIR = "fedfrozen verify RUN --repair"
REMEDIES = {
    "summary.json": f"{REPAIR} rebuilds it from the rounds' rows",
    "model.safetensors": f"{REPAIR} restores it from the last round's checkpoint, if that is whole",
    "best.safetensors": "the final model and all figures can still be used",
    "metrics.jsonl": "fedfrozen resume RUN keeps the rows that are whole; evaluate and export need none",
    "fairness.json": f"{REPAIR} removes it, and fedfrozen fairness RUN evaluates the model again",
    "personal.json": "only a new run with personal=true writes it; the other results can still be used",
    "manifest.jsonl": f"{REPAIR} checks the other files and writes it again",
    "status.json": f"{REPAIR} rebuilds it",
    "tokenizer.json": f"{REPAIR} sets it aside, and it is learned from the run's rows again",
}
OTHERWISE = f"{REPAIR} sets it aside or rebuilds it; the other files can still be used"


class Damaged(UserError):
    """A file is damaged or missing."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why, self.is_missing = path, why, why == MISSING
        self.what = "is missing" if why == MISSING else f"is damaged ({why})"
        remedy = REMEDIES.get(path.name, OTHERWISE).replace("RUN", shlex.quote(str(path.parent)))
        super().__init__(f"{path} {self.what}: {remedy}.")


MISSING = "missing"


@dataclass(frozen=True)
class Checked:
    content: bytes
    recorded: bool  # whether the manifest records it


def read_checked(path: Path) -> Checked | None:
    """The checked content of a file of a run or a sweep; None if none was written. Raises `Damaged`."""
    for last in (*[False] * (TRIES - 1), True):
        known, stamp = known_files(path.parent), manifest_stamp(path.parent)
        try:
            content: bytes | None = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            content = None
        except OSError as error:
            raise Damaged(path, f"it cannot be read: {error.strerror}") from error
        why = difference(known, path.name, content)
        if why is None:
            recorded = known is not None and path.name in known.files
            return None if content is None else Checked(content, recorded)
        if last or manifest_stamp(path.parent) == stamp:
            raise Damaged(path, why)
    raise AssertionError("the last try returns or raises")


def check_file(path: Path) -> bool:
    """`read_checked` for an array file without reading it into memory: whether the manifest records it."""
    for last in (*[False] * (TRIES - 1), True):
        known, stamp = known_files(path.parent), manifest_stamp(path.parent)
        entries = [] if known is None else known.may_be(path.name)
        why = _file_difference(entries, path)
        if why is None:
            return any(entries)
        if last or manifest_stamp(path.parent) == stamp:
            raise Damaged(path, why)
    raise AssertionError("the last try returns or raises")


def check_form(path: Path) -> None:
    """Check the format of an unrecorded file, as nothing else can be checked."""
    try:
        if path.suffix == ".json":
            as_object(path, path.read_bytes())
        elif path.suffix == ".safetensors":
            header(path)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise Damaged(path, "it holds no arrays") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a file with one JSON object; None if there is no such file."""
    found = read_checked(path)
    if found is None:
        return None
    return as_object(path, found.content)


def as_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, "it is not JSON") from error
    if not isinstance(value, dict):
        raise Damaged(path, "it does not hold one JSON object")
    return value


def read_arrays(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Read an array file with its header; it must exist."""
    from safetensors.torch import load_file

    if not path.is_file() and not _is_recorded(path):
        raise Damaged(path, MISSING)
    check_file(path)
    try:
        return load_file(path), header(path)
    except (SafetensorError, *DAMAGED) as error:
        raise Damaged(path, "it holds no arrays") from error


def known_files(folder: Path) -> Manifest | None:
    """The folder's manifest, which must be intact; None if it has none."""
    path = folder / manifest.FILE
    try:
        found = manifest.read(folder)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror}") from error
    if found is not None and found.damage:
        raise Damaged(path, found.damage)
    return found


def difference(known: Manifest | None, name: str, content: bytes | None) -> str | None:
    """How the content differs from its record; None if it does not, or nothing is recorded."""
    entries = [] if known is None else known.may_be(name)
    if not any(entries) or (content is None and None in entries):
        return None
    if content is None:
        return MISSING
    digest = hashlib.sha256(content).hexdigest()
    if any(entry is not None and entry.sha256 == digest for entry in entries):
        return None
    return _words(entries[0] or entries[-1], len(content))


def _file_difference(entries: list[Entry | None], path: Path) -> str | None:
    if not any(entries):
        return None
    try:
        size = path.stat().st_size
        fitting = [entry for entry in entries if entry is not None and entry.size == size]
        if fitting and manifest.file_digest(path) in {entry.sha256 for entry in fitting}:
            return None
    except FileNotFoundError:
        return None if None in entries else MISSING
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return _words(entries[0] or entries[-1], size)


def _words(entry: Entry | None, size: int) -> str:
    written = entry.size if entry is not None else 0
    if size == written:
        return "its bytes are not those that were written"
    return f"it has {size:,} bytes, and {written:,} were written"


def _is_recorded(path: Path) -> bool:
    known = known_files(path.parent)
    return known is not None and path.name in known.files


def manifest_stamp(folder: Path) -> tuple[int, int]:
    """A stamp that changes with every added line."""
    try:
        state = (folder / manifest.FILE).stat()
    except OSError:
        return (0, 0)
    return state.st_mtime_ns, state.st_size


def changed_by_size(folder: Path, known: Manifest) -> list[str]:
    """The quick check: files that are missing, or whose size differs from their record."""
    found = []
    for name in known.files:
        sizes = {None if entry is None else entry.size for entry in known.may_be(name)}
        try:
            size: int | None = (folder / name).stat().st_size
        except OSError:
            size = None
        if size not in sizes:
            found.append(name)
    return found
