"""`fedfrozen fairness RUN...`: for whom a model fails, by site, by class and by subgroup."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedfrozen_app.errors import UserError
from fedfrozen_app.launch import load_run, run_folder
from fedfrozen_app.report.fairness import HEAD, TITLES, columns, group_rows, read_fairness
from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.run.evaluation import judge_fairness
from fedfrozen_app.verb_table import parse


def fairness(arguments: list[str]) -> None:
    given = parse("fairness", arguments)
    for run in [run_folder("fairness", [word])[0] for word in given.runs]:
        found = None if given.by or given.bootstrap else read_fairness(run)
        show(f"{run.parent.name}/{run.name}", found or judged_again(run, given.by, given.bootstrap))


def judged_again(run: Path, by: list[str], times: int) -> dict[str, Any]:
    """The run's final model on its test rows; what own models were judged by stays in the file."""
    resident = load_run(run, [f"dataset.subgroups=[{','.join(by)}]"] if by else [])
    columns = resident.corpus.test_columns
    if missing := [name for name in by if name not in columns]:
        have = ", ".join(sorted(columns)) or "none"
        raise UserError(f"--by {missing[0]}: the test rows have no such column; they have {have}.")
    found = judge_fairness(resident, run, times)
    if found is None:
        raise UserError(f"{run} has no test rows to judge its model by.")
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
        for heading in HEAD:
            table.add_column(heading, justify="left" if heading in ("group", "model") else "right")
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
