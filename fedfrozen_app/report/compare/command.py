"""`fedfrozen compare DIR...`: tables in the terminal and as files next to the runs."""

from collections.abc import Sequence
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files import folder_manifest
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.kinds import check_is_neither, kind_of
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.compare_page import write_comparison
from fedfrozen_app.report.compare.model import Comparison
from fedfrozen_app.report.compare.tables import (
    footnotes,
    runs_csv,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)


def compare(arguments: list[str]) -> None:
    """`fedfrozen compare DIR... [--baseline KEY=VALUE ...] [--target X] [--figure F] [--out DIR]`."""
    given = parse("compare", arguments)
    target = given.out or (given.folders[0] if len(given.folders) == 1 else Path())
    check_target(target.expanduser().resolve(), [folder.expanduser().resolve() for folder in given.folders])
    comparison = collect(given.folders, baseline=given.baseline, target=given.target, tested=given.figure)
    show(comparison, write_all(comparison, target))


def check_target(target: Path, compared: Sequence[Path]) -> None:
    """Refuse a folder of a run or sweep, unless it is the one compared."""
    if target in compared:
        return
    if kind := kind_of(target):
        raise UserError(
            f"{target} is a {kind}, and not what is compared: give the comparison a folder of its own, "
            "--out DIR."
        )
    check_is_neither(target, "a comparison")


def write_all(comparison: Comparison, folder: Path) -> list[Path]:
    """comparison.csv, .md, .tex and .html, and comparison_runs.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "comparison.csv": to_csv(comparison),
        "comparison_runs.csv": runs_csv(comparison),
        "comparison.md": to_markdown(comparison),
        "comparison.tex": to_latex(comparison),
    }
    for name, text in texts.items():
        replace_file(folder / name, text)
    page = write_comparison(comparison, folder / "comparison.html")
    folder_manifest.note_end(folder)
    return [*(folder / name for name in texts), page]


def show(comparison: Comparison, files: Sequence[Path]) -> None:
    console = Console()
    for table in to_terminal(comparison):
        console.print(table)
    for note in footnotes(comparison):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    names = ", ".join(path.name for path in files)
    console.print(f"Written to {files[0].parent}: {names}", markup=False, highlight=False, soft_wrap=True)
