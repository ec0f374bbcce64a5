"""A run's evaluations: the test set, every client's own rows, fairness, and baselines."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from torch import Tensor

from fedfrozen_app.baselines.score import quick_baseline
from fedfrozen_app.census.fairness_groups import SITE, summary, together, unflat
from fedfrozen_app.core.quantiles import LISTED
from fedfrozen_app.data.client_splits import label_counts
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.files.disk import remove_file, replace_file
from fedfrozen_app.files.rows import HEADLINES, Row, read_rows
from fedfrozen_app.local.fair import client_bands, groups_of_table
from fedfrozen_app.local.model_evaluation import (
    evaluate_novel,
    evaluate_test,
    evaluate_validation,
    evaluates_after,
)
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report.fairness import read_fairness
from fedfrozen_app.report.label_picture import label_picture
from fedfrozen_app.report.personal import summarise_clients, write_personal
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.evaluation_round import evaluate_clients
from fedfrozen_app.tasks.target import target_of

log = logging.getLogger(__name__)
DRAWN = 1000  # clients in a figure, evenly spaced, if there are too many to list


def evaluator(strategy: PlannedFedAvg, worker: Worker) -> Callable[[int, ArrayRecord], dict[str, Any] | None]:
    """A function for the central evaluation of the full model, on the test set and the server's validation
    rows."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> dict[str, Any] | None:
        # If nothing is shared, the server's model has its initial values, not a round's result.
        nothing = not (strategy.shares_model or worker.has_global)
        if server_round and (nothing or not evaluates_after(worker.config, server_round)):
            return None
        worker.load(to_tensors(arrays), strategy.digests)
        with worker.only_global():
            test, validation = evaluate_test(worker), evaluate_validation(worker)
            novel = evaluate_novel(worker)
        headline = worker.task.headline
        record: dict[str, Any] = {} if headline in HEADLINES else {"metric": headline}
        record.update({f"test_{key}": value for key, value in test.items()})
        record.update({f"val_{key}": value for key, value in validation.items()})
        record.update({f"novel_{key}": value for key, value in novel.items()})
        return record

    return evaluate


def evaluate_personal(strategy: PlannedFedAvg, worker: Worker, folder: Path) -> dict[str, Any]:
    """Evaluate every client on its own test rows, write `personal.json` and `fairness.png`, and return
    metrics over all clients."""
    rows = read_rows(folder)
    evaluated, failed, traffic = evaluate_clients(strategy, rows[-1]["round"])
    parts = worker.shares.partition
    metrics = summarise_clients(evaluated, rows, () if parts is None else parts.names)
    if parts is not None and len(parts.indices) > LISTED:
        metrics["of_clients"] = len(parts.indices)  # the population of the sample
    metrics |= {"bytes_up": traffic.up, "bytes_down": traffic.down}
    if failed:
        metrics["not_judged"] = failed
    write_personal(metrics, folder)
    by_client = {name_of(worker, client): unflat(own) for client, own in evaluated.items()}
    models = dict.fromkeys(model for own in by_client.values() for model in own)
    groups = {
        model: together({client: own[model] for client, own in by_client.items() if model in own})
        for model in models
    }
    before = read_fairness(folder)
    if before is not None and "global" in before["models"]:
        groups.pop("global", None)  # evaluated exactly, on all rows at once
    if groups:
        write_fairness(groups, worker, folder)
    return {key: value for key, value in metrics.items() if key != "clients"}


def name_of(worker: Worker, client: str) -> str:
    """A client's display name; in a simulation, from the partition."""
    parts = worker.shares.partition
    return client if parts is None or not client.isdecimal() else parts.names[int(client)]


def evaluate_fairness(worker: Worker, folder: Path, times: int = 0) -> dict[str, Any] | None:
    """Evaluate the loaded global model on the test rows, by client, class and subgroup; None without test
    rows, or for a task without classes."""
    if not len(worker.data.test_table) or not worker.task.target.fair:
        return None
    more = {}
    listed = len(worker.shares.test) <= LISTED
    if worker.shares.test and listed:
        more = {SITE: worker.shares.test_clients(len(worker.data.test_table), "(nobody's)")}
    with worker.only_global():
        index = np.arange(len(worker.data.test_table))
        found = groups_of_table(worker, worker.data.test_table, index, more, times)
        if not listed and (bands := client_bands(worker)):
            found["client_bands"] = bands
    return write_fairness({"global": found}, worker, folder)


def write_fairness(models: dict[str, Any], worker: Worker, folder: Path) -> dict[str, Any]:
    """Add these models to fairness.json."""
    path = folder / "fairness.json"
    found = summary(models, worker.config.dataset.subgroup_floor)
    if (before := read_fairness(folder)) is not None:
        found["models"] = before["models"] | found["models"]
    replace_file(path, json.dumps(found, indent=1) + "\n")
    return found


def linear_baseline(strategy: PlannedFedAvg, worker: Worker) -> dict[str, Any] | None:
    """The metrics of a linear model on the same rows; None if this process may not read them, or if the run
    has no global model."""
    config = worker.config
    kept_apart = (
        config.runtime.name not in ("inprocess", "ray")
        or config.privacy.name != "none"
        or config.secure_aggregation.name != "off"
    )
    if str(config.baseline).lower() == "false" or kept_apart:
        return None
    if strategy.personal or not (strategy.shares_model or worker.has_global):
        return None
    return quick_baseline(config, worker.corpus, worker.shares)


def trivial_scores(kind: str, labels: Tensor) -> dict[str, float]:
    """Metrics of a constant prediction: the most frequent class or label; for entities, none."""
    return target_of(kind).trivial(labels)


def write_clients(worker: Worker, folder: Path) -> None:
    """Log the partition, and write each client's number of rows (`clients.json`)."""
    parts = worker.shares.partition
    if parts is None:
        return
    log.info(parts.note)
    if len(parts.indices) > LISTED:  # data.json has quantiles of them
        remove_file(folder / "clients.json")
        return
    # Shows how reliable a client's metrics are. Real sites do not report their numbers of rows.
    sizes = {
        str(number): {
            "name": parts.names[number],
            "rows": len(rows),
            "held_out": len(worker.rows(str(number)).validation),
        }
        for number, rows in enumerate(parts.indices)
    }
    replace_file(folder / "clients.json", json.dumps(sizes, indent=2))


@dataclass
class DrawLabels:
    """A hook that draws every client's labels after the first round's row is visible, because importing
    matplotlib takes about half a second."""

    worker: Worker
    folder: Path
    drawn: bool = False

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        if not self.drawn and row["round"] >= min(1, strategy.num_rounds):
            draw_labels(self.worker, self.folder)
            self.drawn = True
        return False, {}


def draw_labels(worker: Worker, folder: Path) -> None:
    parts = worker.shares.partition
    if parts is None:
        return
    labels, classes = worker.corpus.strata, worker.corpus.stratum_names
    counts = label_counts(labels, parts, len(classes))
    shown = np.arange(len(counts))
    if len(counts) > LISTED:  # too many for a figure
        shown = np.linspace(0, len(counts) - 1, DRAWN).round().astype(np.int64)
    names = [parts.names[number] for number in shown.tolist()]
    label_picture(counts[shown], classes, names, folder / "labels.png", of=len(counts))
