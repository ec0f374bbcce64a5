"""Finds folders with runs, and checks where a new run may start."""

import logging
import shlex
from collections.abc import Iterable
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.kinds import check_run_place, is_run
from fedfrozen_app.files.plain_files import check_no_links
from fedfrozen_app.files.readable import check_readable, folders_with, unreadable_text

log = logging.getLogger(__name__)


def run_folders(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs in any state: the given folders, or those below them."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}: give the folder of a run or a sweep.")
        check_readable(folder)
        if is_run(folder):
            found[folder.resolve()] = None
            continue
        below, hidden = folders_with(folder, ("metrics.jsonl", "status.json"))
        for error in hidden:
            log.warning(unreadable_text(Path(error.filename), error.strerror or str(error)))
        for path in sorted(below, key=lambda path: [_natural(part) for part in path.parts]):
            found[path.resolve()] = None
    return list(found)


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


def sites_file(folder: Path) -> Path:
    """The file of a deployed run with the sites' names by node id."""
    return folder / "flower" / "sites.json"


def authorities_file(folder: Path) -> Path:
    """The file of a deployed run with the certificates of its federation's authorities."""
    return folder / "flower" / "authorities.crt"


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Check that a run may start here: an existing run is only overwritten on request."""
    status.check_unowned(folder)
    check_run_place(folder)
    check_no_links(folder)
    check_empty(folder, overwrite=overwrite)


def check_empty(folder: Path, *, overwrite: bool) -> None:
    """`check_free` for a process that the run's owner has started."""
    if overwrite or not has_results(folder):
        return
    known = status.read(folder)
    state = "" if known is None else f" ({known.state})"
    unfinished = (
        known is not None and known.state != "complete" and checkpoint.numbers(folder / "checkpoints")
    )
    resume = f"go on with fedfrozen resume {shlex.quote(str(folder))}, " if unfinished else ""
    raise UserError(
        f"{folder} holds a run already{state}: {resume}give another output_dir, or add overwrite=true to "
        "lose what is there."
    )


def has_results(folder: Path) -> bool:
    """Whether there are results to lose: not if a run failed before the end of its first round."""
    rows = folder / "metrics.jsonl"
    return (
        any((folder / name).exists() for name in ("summary.json", "model.safetensors"))
        or bool(checkpoint.numbers(folder / "checkpoints"))
        or (rows.is_file() and rows.read_bytes().count(b"\n") > 1)  # the first row is of the initial model
    )


def repeating(words: Iterable[str]) -> list[str]:
    """A command's words without those that would make it write into the same run."""
    kept = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "output_dir":
            quote = value[-1:] if value[-1:] in ("'", '"') else ""
            kept.append(f"{word.removesuffix(quote).rstrip('/')}-again{quote}")
        elif key not in ("run_id", "overwrite", "hydra.run.dir", "hydra.sweep.dir"):
            kept.append(word)
    return kept
