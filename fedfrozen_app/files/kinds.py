"""The kind of a folder: a run, a sweep, or neither, as recorded in its manifest."""

from collections.abc import Iterator
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files import status
from fedfrozen_app.files.folder_manifest import RUN, SWEEP

SWEEPS = ".sweeps"  # in a sweep's folder: the runs requested by each active sweep
RUN_FILES = (status.FILE, "metrics.jsonl", "summary.json")
DEPTH = 3  # levels below a folder that are searched for runs: outputs/DATE/TIME, sweeps/NAME/0


def kind_of(folder: Path) -> str:
    """ "run", "sweep" or "". Folders of older versions are recognised by their files."""
    if recorded := _recorded_kind(folder):
        return recorded
    try:
        if is_run(folder):
            return RUN
        if (folder / SWEEPS).is_dir():
            return SWEEP
        members = (status.read(path.parent) for path in folder.glob(f"*/{status.FILE}"))
        return SWEEP if any(known is not None and known.sweep for known in members) else ""
    except OSError:  # no permission to read it
        return ""


def is_run(folder: Path) -> bool:
    """Whether it holds a run; unlike `kind_of`, this opens no subfolders."""
    if recorded := _recorded_kind(folder):
        return recorded == RUN
    return any((folder / name).is_file() for name in RUN_FILES)


def kind_above(folder: Path) -> str:
    """`kind_of` for a parent folder: a file of such a name alone makes it neither."""
    if recorded := _recorded_kind(folder):
        return recorded
    try:
        rows, kept = folder / "metrics.jsonl", folder / "checkpoints"
        if status.read(folder) is not None or (rows.is_file() and kept.is_dir()):
            return RUN
        return SWEEP if (folder / SWEEPS).is_dir() else ""
    except OSError:
        return ""


def _recorded_kind(folder: Path) -> str:
    try:
        kind = manifest.kind(folder)
    except OSError:  # the folder's other files show its kind
        return ""
    return kind if kind in (RUN, SWEEP) else ""


def check_run_place(folder: Path, *, sweep: Path | None = None) -> None:
    """Check that a run may start here; `sweep`: as a member of the sweep in this folder."""
    if kind_of(folder) == SWEEP:
        raise UserError(
            f"{folder} holds a sweep, and a run needs a folder of its own: give another output_dir."
        )
    _check_above(folder, "a run", allowed=sweep)
    if kind_of(folder) != RUN and (below := next(runs_below(folder), None)) is not None:
        raise UserError(
            f"{folder} holds other runs ({below}), and a run needs a folder of its own: give another "
            "output_dir."
        )


def check_sweep_place(folder: Path) -> None:
    """Check that a sweep may start or continue here."""
    kind = kind_of(folder)
    if kind == RUN:
        raise UserError(
            f"{folder} holds a run, and a sweep needs a folder of its own: give another output_dir."
        )
    _check_above(folder, "a sweep")
    if kind != SWEEP and (below := next(runs_below(folder), None)) is not None:
        raise UserError(
            f"{folder} holds other runs ({below}), which are not of this sweep: give another output_dir."
        )


def check_is_run(folder: Path) -> None:
    """Check the folder for a verb that reads one run."""
    if kind_of(folder) == SWEEP:
        raise UserError(f"{folder} is a sweep: give the folder of one of its runs, such as {folder}/0.")


def check_is_neither(folder: Path, what: str) -> None:
    """Check the folder for results that are neither a run nor a sweep."""
    for place in (folder, *folder.parents):
        if kind := kind_above(place):
            raise UserError(
                f"{place} holds a {kind}, and {what} needs a folder of its own: give another one."
            )


def _check_above(folder: Path, what: str, allowed: Path | None = None) -> None:
    for place in folder.parents:
        if place != allowed and (kind := kind_above(place)):
            raise UserError(
                f"{folder} lies inside the {kind} {place}, and {what} needs a folder of its own: give "
                "another output_dir."
            )


def runs_below(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in folders:
        if kind_of(path):
            yield path
        elif depth > 1:
            yield from runs_below(path, depth - 1)
