"""Checks which files of a folder are intact: a quick check and a thorough one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files import checkpoint, disk, rows, seal, status, uploads
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.readable import unreadable
from fedfrozen_app.files.readers import MISSING, Damaged, changed_by_size, check_file, check_form, known_files

WHOLE, BROKEN, UNCHECKED = "whole", "damaged", "unchecked"
# Files that later commands read or show: without a record of them, damage to them cannot be detected.
RESULTS = (
    *("model.safetensors", "best.safetensors", "summary.json", "fairness.json", "personal.json"),
    *("clients.json", "data.json", "samples.json", "samples.png", "audit.json", "labels.png"),
    "sites.json",
    *("curves.png", "report.html"),
)


class Finding(NamedTuple):
    name: str  # inside the folder
    state: str  # whole, damaged, missing or unchecked
    why: str = ""

    @property
    def is_bad(self) -> bool:
        return self.state in (BROKEN, MISSING)


def quick_look(folder: Path) -> str:
    """A quick check by sizes, for lists of many runs: the problem, or ""."""
    try:
        if (error := status.damage(folder)) is not None:
            return f"{error.path.name} {error.what}"
        known = known_files(folder)
    except Damaged as error:
        return f"{error.path.name} {error.what}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    changed = [] if known is None else changed_by_size(folder, known)
    if known is not None and known.header.get("digest") and not (folder / status.FILE).exists():
        changed.append(status.FILE)
    return f"{', '.join(changed)} damaged or missing" if changed else ""


def check_folder(folder: Path) -> list[Finding]:
    """Check every file of a run, or a sweep's own files, by digest."""
    found = [_manifest(folder)]
    known = None if found[0].state == BROKEN else known_files(folder)
    names = dict.fromkeys((*(known.files if known is not None else ()), *RESULTS))
    for name in names:
        recorded = known is not None and name in known.files
        if recorded or (folder / name).exists():
            found.append(_file(folder / name, known=known is not None))
    found += [*_status(folder), *_rows(folder), *_checkpoints(folder), *_uploads(folder)]
    return found


def _read_manifest(folder: Path) -> manifest.Manifest | None:
    """Read the manifest. A complete run has recorded its end: without that record, lines are lost."""
    found = manifest.read(folder)
    if found is not None and found.kind == manifest.RUN and not (found.ended or found.damage):
        known = status.read(folder)
        if known is not None and known.state == "complete":
            found.damage = "its end is missing"
    return found


def _manifest(folder: Path) -> Finding:
    try:
        found = _read_manifest(folder)
    except OSError as error:
        return Finding(manifest.FILE, BROKEN, f"it cannot be read: {error.strerror}")
    if found is None:
        return Finding(manifest.FILE, UNCHECKED, "there is none, as in folders of older versions")
    return Finding(manifest.FILE, BROKEN, found.damage) if found.damage else Finding(manifest.FILE, WHOLE)


def _file(path: Path, *, known: bool) -> Finding:
    try:
        recorded = known and check_file(path)
        if not recorded:
            check_form(path)
        return _whole_or_unchecked(path.name, recorded)
    except Damaged as error:
        return _finding(path.name, error)


def _whole_or_unchecked(name: str, recorded: bool) -> Finding:
    return Finding(name, WHOLE) if recorded else Finding(name, UNCHECKED, "nothing is recorded of it")


def _finding(name: str, error: Damaged) -> Finding:
    return Finding(name, MISSING) if error.is_missing else Finding(name, BROKEN, error.why)


def _status(folder: Path) -> Iterator[Finding]:
    if (error := status.damage(folder)) is not None:
        yield _finding(status.FILE, error)
    elif (folder / status.FILE).is_file():
        yield Finding(status.FILE, WHOLE)
    elif manifest.is_recorded(folder) and (manifest.read(folder) or manifest.Manifest()).header.get("digest"):
        yield Finding(status.FILE, MISSING)


def _rows(folder: Path) -> Iterator[Finding]:
    try:
        known = known_files(folder)
    except Damaged:
        known = None
    recorded = known is not None and known.rows is not None
    if not (folder / rows.FILE).exists() and not recorded:
        return
    try:
        found = rows.whole_rows(folder)
    except Damaged as error:
        own = error.path.name == rows.FILE
        yield _finding(rows.FILE, error) if own else _whole_or_unchecked(rows.FILE, False)
        return
    if found.damage:
        yield Finding(rows.FILE, MISSING if not (folder / rows.FILE).exists() else BROKEN, found.damage)
    else:
        yield _whole_or_unchecked(rows.FILE, recorded)


def _checkpoints(folder: Path) -> Iterator[Finding]:
    if why := unreadable(folder / "checkpoints"):
        yield Finding("checkpoints", BROKEN, f"it cannot be read: {why}")
    for number in checkpoint.numbers(folder / "checkpoints"):
        name = f"checkpoints/{number}"
        try:
            seal.unsealed(folder / name / "state.json")
        except (SafetensorError, UserError, *DAMAGED) as error:
            yield Finding(name, BROKEN, seal.reason(error))
        else:
            yield Finding(name, WHOLE)


def _uploads(folder: Path) -> Iterator[Finding]:
    if why := unreadable(folder / "uploads"):
        yield Finding("uploads", BROKEN, f"it cannot be read: {why}")
    for number in checkpoint.numbers(folder / "uploads"):
        name = f"uploads/{number}"
        try:
            recorded = bool(uploads.kept_clients(folder / name))
        except DAMAGED as error:
            yield Finding(name, BROKEN, seal.reason(error))
        else:
            yield _whole_or_unchecked(name, recorded)


def mend_manifest(folder: Path) -> str:
    """Rewrite a damaged manifest; "" if it is intact or missing."""
    try:
        known = _read_manifest(folder)
    except OSError:
        return ""
    return write_manifest_again(folder) if known is not None and known.damage else ""


def _checkpoint_entry(folder: Path) -> manifest.Entry | None:
    """The final model's record from the last round's intact checkpoint: a flipped bit keeps size and
    header."""
    model, number = folder / "model.safetensors", max(checkpoint.numbers(folder / "checkpoints"), default=0)
    kept = folder / "checkpoints" / str(number)
    try:
        if seal.unsealed(kept / "state.json")["round"] != (rows.last_row(folder) or {}).get("round"):
            return None
        entry = manifest.entry_of(kept / "model.safetensors")
        alike = entry.size == model.stat().st_size and disk.header(model) == disk.header(
            kept / "model.safetensors"
        )
    except (SafetensorError, *DAMAGED):
        return None
    return entry if alike else None


def write_manifest_again(folder: Path) -> str:
    """Rewrite the manifest without damaged lines and with the current unrecorded files; "" if nothing
    changes."""
    known = _read_manifest(folder)
    before = manifest.Manifest({"is": manifest.RUN}) if known is None else known
    mended = replace(before, damage="", before=None, header=before.header or {"is": manifest.RUN})
    if known is not None and known.damage:  # only an outdated line of a file may be left
        mended.files = {
            name: entry
            for name, entry in known.files.items()
            if (folder / name).is_file() and manifest.file_digest(folder / name) == entry.sha256
        }
        mended.rows = None
    added = [found.name for found in check_folder(folder) if found.state == UNCHECKED]
    files = [name for name in added if name not in manifest.UNRECORDED and (folder / name).is_file()]
    for name in files:
        mended.files[name] = manifest.entry_of(folder / name)
    if "model.safetensors" in files and (entry := _checkpoint_entry(folder)) is not None:
        mended.files["model.safetensors"] = entry  # the file itself may be damaged too
    if mended.rows is None and (folder / rows.FILE).is_file():
        mended.rows = rows.unrecorded_digests(folder)
    if known is not None and not known.damage and not files and mended.rows == known.rows:
        return ""
    manifest.rewrite(folder, mended)
    return f"{manifest.FILE} was written again; files that it did not know are recorded as they are now."
