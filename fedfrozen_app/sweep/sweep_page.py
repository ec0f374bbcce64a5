"""The page of a sweep, finished or not: the state of each run, then the comparison of the complete ones."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.rows import metric_name, number, read_rows
from fedfrozen_app.report.compare import compare_page as comparison
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.console import rounds_text
from fedfrozen_app.report.curves import series
from fedfrozen_app.report.html import linked_cell, render_page, render_part
from fedfrozen_app.report.summary import read_summary


def sweep_page(folder: Path, *, link: comparison.Link, version: str = "") -> str:
    runs = run_folders([folder])
    states = _states(runs, link)
    try:
        found = collect(runs)
    except UserError as error:  # no run has finished, or the runs cannot be compared: shown on the page
        name = folder.resolve().name
        return render_page(
            "sweep.html", folder.name, version=version, name=name, reason=str(error), states=states
        )
    return comparison.render(found, link=link, first=states, version=version)


def _states(runs: Sequence[Path], link: comparison.Link) -> str:
    lines = []
    for run in runs:
        try:
            rows = read_rows(run) if (run / "metrics.jsonl").is_file() else []
            summary = read_summary(run, rows)
        except UserError as error:  # one damaged run must not break the page
            rows, summary = [], {"status": str(error)}
        metric = metric_name(rows)
        scores = series(rows, f"test_{metric}").values
        known = status.read(run)  # all that a run that failed before its first checkpoint has written
        overrides = shlex.split(str(summary.get("command", "")))[1:] or (known.overrides if known else [])
        lines.append((run, overrides, rows, summary, scores))
    everywhere = (
        set.intersection(*(set(overrides) for _, overrides, *_ in lines)) if len(lines) > 1 else set()
    )
    body = []
    for run, overrides, rows, summary, scores in lines:
        label = " ".join(word for word in overrides if word not in everywhere) or run.name
        score = f"{number(scores[-1]):.4f}" if scores else ""
        state = str(summary.get("status", "completed"))
        done = rounds_text(rows, {**summary, "status": "completed"})  # the state has its own column
        body.append([linked_cell(label, link(run)), run.name, state, score, done])
    complete = all(summary.get("status", "completed") == "completed" for *_, summary, _ in lines)
    return render_part("sweep_states.html", body=body, unfolded=not complete)
