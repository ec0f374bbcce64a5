"""`fedfrozen baselines RUN`: results of plain models, and of the run's own model, on the run's rows."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.baselines.own_model import of_run, own_scores, plain_settings, why_not
from fedfrozen_app.baselines.same_rows import same_rows
from fedfrozen_app.baselines.score import scores
from fedfrozen_app.config import ComposedConfig, Config, excluded_clients
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.data.federated import Shares, load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.rows import metric_name, metric_title, number, read_rows
from fedfrozen_app.launch import composed_of_run, finished, run_folder
from fedfrozen_app.report.baseline_tables import FILE, spread_text
from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.runtimes.inprocess.central_run import CentralRuns

log = logging.getLogger(__name__)


def baselines(arguments: list[str]) -> None:
    given = parse("baselines", arguments)
    run, _ = run_folder("baselines", [given.run])
    summary = finished(run)
    composed = composed_of_run(run, summary, [], trusted=given.trust_folder)
    config = composed.config
    check_rows_are_here(config)
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    rows = same_rows(config, corpus, shares, quick=False)
    found = [] if rows is None else scores(rows)
    if not given.plain:
        write(run, summary, found)  # intermediate results: the rest may take as long as the run
        found += own_model(composed, corpus, shares)
    if not found:
        raise UserError(
            f"There is no plain model for these rows (dataset.task={corpus.task}), and the run's own was "
            "not asked for: leave --plain out."
            if given.plain
            else f"There is no baseline for these rows (dataset.task={corpus.task})."
        )
    write(run, summary, found)
    write_report(run)
    show(run, summary, found)


def own_model(composed: ComposedConfig, corpus: Corpus, shares: Shares) -> Iterator[dict[str, Any]]:
    """The run's own model, pooled and at each site alone; nothing, with a logged reason, if that is
    impossible."""
    plain = replace(composed, overrides=[], resolved=plain_settings(composed.resolved), recorded=True)
    if reason := why_not(composed.config, plain.config):
        log.warning("The run's own model is not trained without its federation: %s.", reason)
        return
    central = of_run(shares, excluded_clients(composed.config))
    rounds = counted(plain.config.num_rounds, "round")
    alone = counted(len(central.drawn()), "client")
    log.info("The run's own model trains on all rows, and at %s alone, %s each.", alone, rounds)
    yield from own_scores(central, CentralRuns(plain, corpus).train)


def write(run: Path, summary: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Write baselines.json; `rounds` in it shows whether the run has continued since."""
    stored = {"version": 2, "rounds": summary.get("rounds"), "baselines": found}
    replace_file(run / FILE, json.dumps(stored, indent=1) + "\n")


def check_rows_are_here(config: Config) -> None:
    if config.runtime.name == "deployed":
        raise UserError("The rows of this run are at its sites: a plain model cannot read them here.")
    if config.privacy.name != "none" or config.secure_aggregation.name != "off":
        raise UserError(
            "This run keeps its clients' rows from the server (privacy, masks), and a plain model would read "
            "them all: run it again with privacy=none secure_aggregation=off for a figure to compare with."
        )


def show(run: Path, summary: dict[str, Any], found: list[dict[str, Any]]) -> None:
    metric = metric_name(read_rows(run))
    title = metric_title(metric)
    table = Table(title=Text(f"{run.parent.name}/{run.name}: test {title}"), title_justify="left")
    for heading in ("", title, "clients", "train rows", "seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    rounds = f"{summary.get('rounds', 0)} rounds"
    table.add_row("this run", f"{number(summary.get(f'final_test_{metric}')):.4f}", "", rounds, "")
    for one in found:
        cells = [f"{number(one.get(metric)):.4f}", spread_text(one, metric)]
        table.add_row(Text(one["name"]), *cells, f"{one['train_rows']:,}", f"{one['seconds']:.1f}")
    Console(width=110).print(table)
