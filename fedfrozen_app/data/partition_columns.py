"""Partitions by a column: one client per value, or for domains several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition_draws import DIRICHLET_STREAM, dirichlet
from fedfrozen_app.data.partition_spec import DRAWN, Partition, PartitionSpec, client_sizes

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
    groups = _groups(columns[column], column)
    per_group = spec.clients_per_domain if spec.name == "domain" else 1
    total = len(groups) * per_group
    if num_clients is not None and num_clients != total:
        several = f" with {per_group} clients each" if per_group > 1 else ""
        what = "the file" if spec.name == "file" else f"column {column!r}"
        raise UserError(
            f"num_clients={num_clients} does not fit partition={spec.name}: {what} has "
            f"{len(groups)} values{several}, so set num_clients={total} or leave it null."
        )

    note = f"One client per value of {column!r}" if spec.name != "file" else "As the file says"
    indices: list[np.ndarray] = []
    names: list[str] = []
    if per_group == 1:
        names, indices = list(groups), list(groups.values())
    else:
        note = f"{per_group} clients per value of {column!r}"
        for number, (value, rows) in enumerate(groups.items()):
            _checked_domain(value, len(rows), spec)
            parts, remark = dirichlet(labels[rows], per_group, spec, (seed, DIRICHLET_STREAM, number))
            note += f"; {value}: {remark}"
            indices += [rows[part] for part in parts]
            names += [f"{value}/{part}" for part in range(per_group)]
    small = [name for name, rows in zip(names, indices, strict=True) if len(rows) < spec.min_size]
    note += f": {client_sizes(indices)}"
    if small:
        shown = ", ".join(small[:5]) + (", ..." if len(small) > 5 else "")
        note += f"; kept {len(small)} with fewer than {spec.min_size} ({shown})"
    return Partition(tuple(indices), note + ".", tuple(names))


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


def _groups(values: np.ndarray, column: str) -> dict[str, np.ndarray]:
    missing = sum(value is None or value == "" for value in values.tolist())
    if missing:
        raise UserError(
            f"{missing} train rows have no value in column {column!r}: fill them in or set "
            "partition.column to a complete column."
        )
    groups: dict[Any, list[int]] = {}
    for row, value in enumerate(values.tolist()):
        groups.setdefault(value, []).append(row)
    return {str(value): np.array(groups[value]) for value in sorted(groups)}
