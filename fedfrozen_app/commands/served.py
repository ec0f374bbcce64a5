"""`fedfrozen fairness RUN...`: for whom a model fails, by site, by class and by subgroup."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.launch import load_run, run_folder
from fedfrozen_app.report.calibration import lines_of, read_calibration, tables_of
from fedfrozen_app.report.fairness import TITLES, columns, group_rows, head_of, read_fairness
from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.run.evaluation import evaluate_fairness


def fairness(arguments: list[str]) -> None:
    given = parse("fairness", arguments)
    for run in [run_folder("fairness", [word])[0] for word in given.runs]:
        found = None if given.by or given.bootstrap else read_fairness(run)
        show(f"{run.parent.name}/{run.name}", found or evaluate_again(run, given))
        if (calibration := read_calibration(run)) is not None:
            for line in lines_of(calibration):
                Console(width=120).print(line, highlight=False, markup=False, soft_wrap=True)
            for sheet in tables_of(calibration):
                Console(width=120).print(sheet)


def evaluate_again(run: Path, given: Namespace) -> dict[str, Any]:
    """Evaluate the run's final model on its test rows; the file keeps the results of personal models."""
    by: list[str] = given.by
    extra = [f"dataset.subgroups=[{','.join(by)}]"] if by else []
    worker = load_run(run, extra, trusted=given.trust_folder)
    columns = worker.corpus.test_columns
    if missing := [name for name in by if name not in columns]:
        have = ", ".join(sorted(columns)) or "none"
        raise UserError(f"--by {missing[0]}: the test rows have no such column; they have {have}.")
    found = evaluate_fairness(worker, run, given.bootstrap)
    if found is None:
        raise UserError(f"{run} has no test rows to evaluate its model on.")
    write_report(run)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    console = Console(width=120)
    for column in ("all", *columns(found)):
        rows = group_rows(found, column)
        if not rows:
            continue
        title = f"{name}: all rows" if column == "all" else f"{name}: by {column}, worst first"
        table = Table(title=Text(title), title_justify="left")
        for place, heading in enumerate(head_of(column)):
            table.add_column(heading, justify="left" if place < 2 else "right")
        for line in rows:
            table.add_row(*map(Text, line))
        console.print(table)
    for model, own in found["models"].items():
        for column, gap in own["gaps"].items():
            console.print(
                f"{TITLES.get(model, model)}, by {column}: {gap['worst']} is {gap['gap']:.3f} below "
                f"{gap['best']} (95 %: {gap['low']:.3f} to {gap['high']:.3f}).",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
