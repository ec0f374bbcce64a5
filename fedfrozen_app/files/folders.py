"""Which folders hold a run."""

from collections.abc import Iterable
from pathlib import Path

from fedfrozen_app.errors import UserError


def run_folders(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs, whatever their state: those given, or those below."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}: give the folder of a run or a sweep.")
        if _is_run(folder):
            found[folder.resolve()] = None
            continue
        below = {path.parent for name in ("metrics.jsonl", "status.json") for path in folder.rglob(name)}
        for path in sorted(below, key=lambda path: [_natural(part) for part in path.parts]):
            found[path.resolve()] = None
    return list(found)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "metrics.jsonl", "status.json"))


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
