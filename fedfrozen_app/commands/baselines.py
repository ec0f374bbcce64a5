"""`fedfrozen baselines RUN`: what plain models have on the rows of a run."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.baselines.same_rows import same_rows
from fedfrozen_app.baselines.score import scores
from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.rows import HEADLINES, metric_title, number
from fedfrozen_app.launch import config_of_run, finished, run_folder

FILE = "baselines.json"


def baselines(arguments: list[str]) -> None:
    given = parse("baselines", arguments)
    run, _ = run_folder("baselines", [given.run])
    summary = finished(run)
    config = config_of_run(run, summary, [], trusted=given.trust_folder)
    check_rows_are_here(config)
    corpus = load_corpus(config)
    rows = same_rows(config, corpus, share_out(corpus, config, config.num_clients), quick=False)
    found = [] if rows is None else scores(rows)
    if not found:
        raise UserError(f"There is no plain model for these rows (dataset.task={corpus.task}).")
    replace_file(run / FILE, json.dumps({"version": 1, "baselines": found}, indent=1) + "\n")
    show(run, summary, found)


def check_rows_are_here(config: Config) -> None:
    if config.runtime.name == "deployed":
        raise UserError("The rows of this run are at its sites: a plain model cannot read them here.")
    if config.privacy.name != "none" or config.secure_aggregation.name != "off":
        raise UserError(
            "This run keeps its clients' rows from the server (privacy, masks), and a plain model would read "
            "them all: run it again with privacy=none secure_aggregation=off for a figure to compare with."
        )


def show(run: Path, summary: dict[str, Any], found: list[dict[str, Any]]) -> None:
    metric = next(name for name in HEADLINES if name in found[0])
    title = metric_title(metric)
    table = Table(title=Text(f"{run.parent.name}/{run.name}: test {title}"), title_justify="left")
    for heading in ("", title, "train rows", "seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    rounds = f"{summary.get('rounds', 0)} rounds"
    table.add_row("this run", f"{number(summary.get(f'final_test_{metric}')):.4f}", rounds, "")
    for one in found:
        table.add_row(
            Text(one["name"]), f"{one[metric]:.4f}", f"{one['train_rows']:,}", f"{one['seconds']:.1f}"
        )
    Console(width=110).print(table)
