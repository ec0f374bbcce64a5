"""Which folders hold a run, and where another may begin."""

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
    """The folders of runs, whatever their state: those given, or those below."""
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
    """Where a deployed run has the names of the sites, by their nodes' ids."""
    return folder / "flower" / "sites.json"


def authorities_file(folder: Path) -> Path:
    """Where a deployed run has the certificates of its federation's authorities."""
    return folder / "flower" / "authorities.crt"


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Whether a run may begin here: one that is there already is not lost without being asked for."""
    status.check_unowned(folder)
    check_run_place(folder)
    check_no_links(folder)
    check_empty(folder, overwrite=overwrite)


def check_empty(folder: Path, *, overwrite: bool) -> None:
    """The same for a process that its owner has started."""
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
    """Not one that failed before the end of its first round: there is nothing to lose."""
    rows = folder / "metrics.jsonl"
    return (
        any((folder / name).exists() for name in ("summary.json", "model.safetensors"))
        or bool(checkpoint.numbers(folder / "checkpoints"))
        or (rows.is_file() and rows.read_bytes().count(b"\n") > 1)  # the first is of the model as it began
    )


def repeating(words: Iterable[str]) -> list[str]:
    """The words of a command without those that would lead it into the same run again."""
    kept = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "output_dir":
            quote = value[-1:] if value[-1:] in ("'", '"') else ""
            kept.append(f"{word.removesuffix(quote).rstrip('/')}-again{quote}")
        elif key not in ("run_id", "overwrite", "hydra.run.dir", "hydra.sweep.dir"):
            kept.append(word)
    return kept
