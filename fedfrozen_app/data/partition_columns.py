"""Partitions by a column: one client per value, or for domains several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition_draws import DIRICHLET_STREAM, dirichlet
from fedfrozen_app.data.partition_spec import DRAWN, Partition, PartitionSpec, client_sizes
from fedfrozen_app.data.row_lists import RowLists, distinct

FILE_COLUMN = "client of the file"  # among the columns, where a file names each row's client


def grouping_column(columns: Mapping[str, np.ndarray], spec: PartitionSpec) -> str | None:
    """The column whose values this partition keeps apart, if it divides by one."""
    return None if spec.name in (*DRAWN, "like") else _column_name(columns, spec)


def by_column(
    labels: np.ndarray,
    columns: Mapping[str, np.ndarray],
    spec: PartitionSpec,
    num_clients: int | None,
    seed: int,
) -> Partition:
    """One client per value of a column; for domains, optionally several."""
    if spec.clients_per_domain < 1:
        raise UserError(f"partition.clients_per_domain={spec.clients_per_domain} must be at least 1.")
    column = _column_name(columns, spec)
    values, owners = groups_of(columns[column], column)
    per_group = spec.clients_per_domain if spec.name == "domain" else 1
    total = len(values) * per_group
    if num_clients is not None and num_clients != total:
        several = f" with {per_group} clients each" if per_group > 1 else ""
        what = "the file" if spec.name == "file" else f"column {column!r}"
        raise UserError(
            f"num_clients={num_clients} does not fit partition={spec.name}: {what} has "
            f"{len(values)} values{several}, so set num_clients={total} or leave it null."
        )

    note = f"One client per value of {column!r}" if spec.name != "file" else "As the file says"
    names, indices = values, RowLists.of_owners(owners, len(values))
    if per_group > 1:
        note = f"{per_group} clients per value of {column!r}"
        indices, names, remarks = _divided(labels, values, indices, spec, seed)
        note += remarks
    small = np.flatnonzero(indices.sizes < spec.min_size)
    note += f": {client_sizes(indices)}"
    if len(small):
        shown = ", ".join(names[number] for number in small[:5]) + (", ..." if len(small) > 5 else "")
        note += f"; kept {len(small)} with fewer than {spec.min_size} ({shown})"
    return Partition(indices, note + ".", names)


def _divided(
    labels: np.ndarray, values: Sequence[str], groups: RowLists, spec: PartitionSpec, seed: int
) -> tuple[RowLists, tuple[str, ...], str]:
    """Several clients for each value: their rows, their names, and what was done in words."""
    per_group, indices, names, remarks = spec.clients_per_domain, [], [], ""
    for number, (value, rows) in enumerate(zip(values, groups, strict=True)):
        _checked_domain(value, len(rows), spec)
        parts, remark = dirichlet(labels[rows], per_group, spec, (seed, DIRICHLET_STREAM, number))
        remarks += f"; {value}: {remark}"
        indices += [rows[part] for part in parts]
        names += [f"{value}/{part}" for part in range(per_group)]
    return RowLists.of(indices), tuple(names), remarks


def _checked_domain(value: str, rows: int, spec: PartitionSpec) -> None:
    if spec.clients_per_domain * spec.min_size > rows:
        raise UserError(
            f"{spec.clients_per_domain} clients of at least {spec.min_size} examples do not fit "
            f"into domain {value!r} with {rows} train rows: set partition.clients_per_domain to "
            f"{max(1, rows // spec.min_size)} or lower partition.min_size."
        )


def _column_name(columns: Mapping[str, np.ndarray], spec: PartitionSpec) -> str:
    if spec.name == "file":
        return FILE_COLUMN
    have = ", ".join(sorted(columns)) or "none"
    if spec.column is not None:
        if spec.column not in columns:
            raise UserError(
                f"partition.column={spec.column!r} is not in the data set: its columns are {have}."
            )
        return spec.column
    if spec.name == "domain" and "domain" in columns:
        return "domain"
    if spec.name == "natural" and len(columns) == 1:
        return next(iter(columns))
    if not columns:
        raise UserError(
            f"partition={spec.name} needs a column to divide by and this data set has none: "
            "use partition=dirichlet or partition=iid."
        )
    raise UserError(f"partition={spec.name} needs partition.column: the data set has the columns {have}.")


def groups_of(values: np.ndarray, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The values of a column in order, and for each row the number of its value among them."""
    if values.dtype.kind in "iu":
        found, _, numbers = distinct(values)
        return tuple(map(str, found.tolist())), numbers
    cells = values.tolist()
    missing = sum(value is None or value == "" for value in cells)
    if missing:
        raise UserError(
            f"{missing} train rows have no value in column {column!r}: fill them in or set "
            "partition.column to a complete column."
        )
    places: dict[Any, int] = {value: place for place, value in enumerate(sorted(set(cells)))}
    owners = np.fromiter((places[value] for value in cells), dtype=np.int64, count=len(cells))
    return tuple(map(str, places)), owners
