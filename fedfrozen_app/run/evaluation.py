"""What a run looks at beside its rounds: the test set, every client's own rows, who has which classes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from fedfrozen_app.data.partition import label_counts
from fedfrozen_app.data.picture import label_picture
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.fairness.groups import SITE, summary, together, unflat
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.local.fair import judge_rows
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.report.fairness import read_fairness
from fedfrozen_app.report.personal import summarise_clients, write_personal
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.judge import evaluate_clients

log = logging.getLogger(__name__)


def evaluator(
    strategy: PlannedFedAvg, resident: Resident
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """The central evaluation of the full model, on the test set and the server's validation rows."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        # Where nothing is shared the server's own model stays what it was built as: no round's result.
        nothing = not (strategy.shares_model or resident.has_global)
        if server_round and (nothing or not resident.evaluates_after(server_round)):
            return None
        resident.load(to_tensors(arrays), strategy.digests)
        with resident.only_global():
            test, validation = resident.evaluate_test(), resident.evaluate_validation()
            novel = resident.evaluate_novel()
        record = MetricRecord()
        record.update({f"test_{key}": value for key, value in test.items()})
        record.update({f"val_{key}": value for key, value in validation.items()})
        record.update({f"novel_{key}": value for key, value in novel.items()})
        return record

    return evaluate


def judge_personal(strategy: PlannedFedAvg, resident: Resident, folder: Path) -> dict[str, Any]:
    """Every client on its own test rows, in `personal.json` and `fairness.png`; the figures over clients."""
    rows = read_rows(folder)
    judged, failed, traffic = evaluate_clients(strategy, rows[-1]["round"])
    parts = resident.shares.partition
    figures = summarise_clients(judged, rows, () if parts is None else parts.names)
    figures |= {"bytes_up": traffic.up, "bytes_down": traffic.down}
    if failed:
        figures["not_judged"] = failed
    write_personal(figures, folder)
    by_client = {names_of(resident).get(client, client): unflat(own) for client, own in judged.items()}
    models = dict.fromkeys(model for own in by_client.values() for model in own)
    told = {
        model: together({client: own[model] for client, own in by_client.items() if model in own})
        for model in models
    }
    before = read_fairness(folder)
    if before is not None and "global" in before["models"]:
        told.pop("global", None)  # judged on all rows at once, which is exact
    if told:
        write_fairness(told, resident, folder)
    return {key: value for key, value in figures.items() if key != "clients"}


def names_of(resident: Resident) -> dict[str, str]:
    """What people call the clients of a simulation."""
    parts = resident.shares.partition
    return {} if parts is None else {str(number): name for number, name in enumerate(parts.names)}


def judge_fairness(resident: Resident, folder: Path, times: int = 0) -> dict[str, Any] | None:
    """The global model as it is loaded, on the test rows, by client, class and subgroup; None without, or
    where a model knows no classes."""
    if not len(resident.test_table) or resident.task.kind == "language":
        return None
    more = {}
    if resident.shares.test:
        clients = np.full(len(resident.test_table), "(nobody's)", dtype=object)
        for number, rows in enumerate(resident.shares.test):
            clients[rows] = names_of(resident)[str(number)]
        more = {SITE: clients}
    with resident.only_global():
        index = np.arange(len(resident.test_table))
        found = judge_rows(resident, resident.test_table, index, more, times)
    return write_fairness({"global": found}, resident, folder)


def write_fairness(models: dict[str, Any], resident: Resident, folder: Path) -> dict[str, Any]:
    """fairness.json, beside what other models of the run are in it already."""
    path = folder / "fairness.json"
    found = summary(models, resident.config.dataset.subgroup_floor)
    if (before := read_fairness(folder)) is not None:
        found["models"] = before["models"] | found["models"]
    replace_file(path, json.dumps(found, indent=1) + "\n")
    return found


def majority_share(labels: Tensor) -> float | None:
    """The share of the most frequent class; None where a row has several labels, or there is no row."""
    if labels.dim() > 1 or not len(labels):
        return None
    return float(labels.unique(return_counts=True)[1].max()) / len(labels)


def draw_labels(resident: Resident, folder: Path) -> None:
    """Who has which classes, as a picture, and how many rows (`clients.json`)."""
    parts = resident.shares.partition
    if parts is None:
        return
    log.info(parts.note)
    labels, classes = resident.corpus.strata, resident.corpus.stratum_names
    counts = label_counts(labels, parts, len(classes))
    label_picture(counts, classes, parts.names, folder / "labels.png")
    # How much a client's figures can be worth. Sites of their own tell nobody how many rows they hold.
    sizes = {
        str(number): {
            "name": parts.names[number],
            "rows": len(rows),
            "held_out": len(resident.rows(str(number)).validation),
        }
        for number, rows in enumerate(parts.indices)
    }
    replace_file(folder / "clients.json", json.dumps(sizes, indent=2))
