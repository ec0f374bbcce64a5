"""Metrics of the global model on each site's test rows, for targets without classes: `sites.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfrozen_app.config import excluded_clients
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.data.table import Table
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report.site_scores import FILE

ALL = "all test rows"
MOST_SITES = 10_000  # of more, an evenly spaced sample
MOST_ROWS = 20_000  # of the reference: of more, an evenly spaced sample


def write_site_scores(worker: Worker, folder: Path) -> None:
    """Write the loaded model's metrics by site; does nothing if the target has none, or without test rows."""
    table = worker.data.test_table
    if not worker.task.target.by_site or not len(table):
        return
    kind, reference = reference_of(worker)
    parts: dict[str, Any] = {ALL: np.arange(len(table))}
    if (partition := worker.shares.partition) is not None and worker.shares.test:
        shown = range(len(partition.names))
        if len(partition.names) > MOST_SITES:
            shown = np.linspace(0, len(partition.names) - 1, MOST_SITES).round().astype(int).tolist()
        parts |= {partition.names[number]: worker.shares.test[number] for number in shown}
    rows = [
        {"name": name, **scores(worker, table.take(torch.as_tensor(part)), reference)}
        for name, part in parts.items()
    ]
    found = {"version": 1, "reference": kind, "rows": rows}
    replace_file(folder / FILE, json.dumps(found, indent=1) + "\n")


def scores(worker: Worker, table: Table, reference: Any) -> dict[str, Any]:
    """The metrics on these test rows; only `rows` if there are none."""
    task = worker.task
    found: dict[str, Any] = {"rows": len(table)}
    if not len(table):
        return found
    found |= task.evaluate(table)
    if reference is not None:
        found |= task.target.site_scores(task.all_logits(table), table.labels, reference)
    return found


def reference_of(worker: Worker) -> tuple[str | None, Any]:
    """The source and value of the reference for sites' scores: the clients' training rows if this process may
    read them, else the test rows without the model's logits."""
    target = worker.task.target
    if not target.needs_reference:
        return None, None
    rows = train_rows(worker)
    if rows is None:
        return "test", target.reference(None, worker.data.test_table.labels)
    table = worker.train_table.take(rows)
    return "train", target.reference(worker.task.all_logits(table), table.labels)


def train_rows(worker: Worker) -> torch.Tensor | None:
    """The training rows of all clients; None if this process may not read them."""
    config, partition = worker.config, worker.shares.partition
    apart = config.privacy.name != "none" or config.secure_aggregation.name != "off"
    if partition is None or apart:
        return None
    left_out = excluded_clients(config)
    clients: Sequence[str] = Numbered(len(partition.indices), frozenset(left_out))
    if len(clients) > MOST_ROWS:  # at least one row of each
        clients = [
            clients[place] for place in np.linspace(0, len(clients) - 1, MOST_ROWS).astype(int).tolist()
        ]
    rows = torch.cat([worker.rows(client).train for client in clients])
    if len(rows) <= MOST_ROWS:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, MOST_ROWS).long()]
