"""A loaded model's metrics on test rows by group, for a client or the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfrozen_app.census.fairness_groups import Found, evaluate_groups
from fedfrozen_app.census.fairness_scores import Predictions
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.quantiles import quantiles
from fedfrozen_app.data.row_lists import row_lists
from fedfrozen_app.data.table import Table

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def group_metrics(worker: Worker, client: str) -> Found:
    """The loaded model on the client's own test rows; empty for a task without classes."""
    if not worker.task.target.fair:
        return {}
    index = worker.data.client_test_index(client)
    return groups_of_table(worker, worker.data.client_test_rows(client), index, {})


def groups_of_table(
    worker: Worker, table: Table, index: np.ndarray, more: Mapping[str, np.ndarray], times: int = 0
) -> Found:
    """`index`: the indices of these rows in the test table; `more`: additional columns."""
    dataset = worker.config.dataset
    columns = {name: values[index] for name, values in subgroup_columns(worker).items()} | dict(more)
    probabilities = worker.task.probabilities(table).numpy()
    labels, people = table.labels.cpu().numpy(), worker.corpus.test_units[index]
    rows = np.arange(len(labels))
    if worker.task.target.over_tokens:  # every token is evaluated
        rows, place = np.nonzero(labels >= 0)
        probabilities, labels = probabilities[rows, place], labels[rows, place]
    predictions = Predictions(probabilities, labels, people[rows])
    own = {name: values[rows].tolist() for name, values in columns.items()}
    return evaluate_groups(predictions, own, worker.corpus.classes, dataset.subgroup_floor, times)


def client_bands(worker: Worker) -> dict[str, Any]:
    """Quantiles over the clients with test rows: the loaded model's accuracy, and the number of rows."""
    dealt, table = row_lists(worker.shares.test), worker.data.test_table
    if table.labels.ndim > 1 or not len(dealt.rows):
        return {}
    _, predictions = worker.task.predict(table, worker.task.rows_at_once(table))
    right = (predictions.cpu() == table.labels.cpu()).numpy()
    sizes, having = dealt.sizes, dealt.sizes > 0
    hits = np.bincount(dealt.owner_of_each, weights=right[dealt.rows], minlength=len(dealt))
    return {
        "clients": int(having.sum()),
        "accuracy": quantiles(hits[having] / sizes[having]),
        "test_rows": quantiles(sizes[having]),
    }


def subgroup_columns(worker: Worker) -> dict[str, Any]:
    """The subgroup columns that the test rows have."""
    columns = worker.corpus.test_columns
    return {name: columns[name] for name in worker.config.dataset.subgroups or () if name in columns}


def check_subgroups(worker: Worker) -> None:
    """Raise if the test rows lack a subgroup column. A site may have columns that the server's rows lack."""
    columns = worker.corpus.test_columns
    for name in worker.config.dataset.subgroups or ():
        if name not in columns and worker.shares.partition is not None:
            have = ", ".join(sorted(columns)) or "none"
            raise UserError(f"dataset.subgroups names {name!r}, and the test rows have the columns: {have}.")
