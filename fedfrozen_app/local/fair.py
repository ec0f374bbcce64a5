"""A loaded model's predictions on test rows, by group: what a client, or the server, judges it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfrozen_app.data.table import Table
from fedfrozen_app.errors import UserError
from fedfrozen_app.fairness.groups import Found, judge_groups
from fedfrozen_app.fairness.scores import Judged

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


def fair_figures(resident: Resident, client: str) -> Found:
    """Of the model as it is loaded, on the client's own test rows; nothing where there are no classes."""
    if resident.task.kind == "language":
        return {}
    index = resident.client_test_index(client)
    return judge_rows(resident, resident.client_test_rows(client), index, {})


def judge_rows(
    resident: Resident, table: Table, index: np.ndarray, more: Mapping[str, np.ndarray], times: int = 0
) -> Found:
    """`index` are the numbers of these rows in the test table; `more` are columns beside the subgroups."""
    dataset = resident.config.dataset
    columns = {name: values[index] for name, values in subgroup_columns(resident).items()} | dict(more)
    probabilities = resident.task.probabilities(table).numpy()
    labels, people = table.labels.cpu().numpy(), resident.corpus.test_units[index]
    rows = np.arange(len(labels))
    if resident.task.kind == "tokens":  # every word is judged
        rows, place = np.nonzero(labels >= 0)
        probabilities, labels = probabilities[rows, place], labels[rows, place]
    judged = Judged(probabilities, labels, people[rows])
    own = {name: values[rows].tolist() for name, values in columns.items()}
    return judge_groups(judged, own, resident.corpus.classes, dataset.subgroup_floor, times)


def subgroup_columns(resident: Resident) -> dict[str, Any]:
    """Of the test rows; those that the data do not have are left out."""
    columns = resident.corpus.test_columns
    return {name: columns[name] for name in resident.config.dataset.subgroups or () if name in columns}


def check_subgroups(resident: Resident) -> None:
    """A sentence where the test rows lack one; sites have columns that the server's own rows may not have."""
    columns = resident.corpus.test_columns
    for name in resident.config.dataset.subgroups or ():
        if name not in columns and resident.shares.partition is not None:
            have = ", ".join(sorted(columns)) or "none"
            raise UserError(f"dataset.subgroups names {name!r}, and the test rows have the columns: {have}.")
