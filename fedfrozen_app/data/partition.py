"""Which client holds which rows: train rows dealt to clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data import partition_rules as rules
from fedfrozen_app.data.partition_columns import by_column
from fedfrozen_app.data.partition_draws import DIRICHLET_STREAM, RULES_STREAM, dirichlet, iid
from fedfrozen_app.data.partition_like import like, read_census
from fedfrozen_app.data.partition_spec import DRAWN, NAMES, Partition, PartitionSpec, client_sizes
from fedfrozen_app.data.row_lists import RowLists


def partition(
    labels: np.ndarray,
    columns: Mapping[str, np.ndarray],
    spec: PartitionSpec,
    num_clients: int | None,
    seed: int,
    classes: Sequence[str] = (),
) -> Partition:
    """Deal the train rows to clients; the same seed always deals the same. `classes`: the labels' names."""
    if spec.name not in NAMES:
        raise UserError(f"partition={spec.name!r} is unknown: choose one of {', '.join(NAMES)}.")
    if spec.min_size < 1:
        raise UserError(f"partition.min_size={spec.min_size} must be at least 1.")
    if not (spec.alpha > 0 and math.isfinite(spec.alpha)):
        raise UserError(f"partition.alpha={spec.alpha} must be a number above 0.")
    if spec.name == "like":
        return _like(labels, classes, spec, num_clients, seed)
    if spec.name not in DRAWN:
        return by_column(labels, columns, spec, num_clients, seed)

    count = _checked_count(num_clients, spec.min_size, len(labels))
    names = Numbered(count)
    indices, remark = _drawn(labels, count, spec, seed)
    if spec.noise:
        remark += f", with noise up to {spec.noise:g} of the pixels' range"
    return Partition(indices, f"{remark}: {client_sizes(indices)}.", names)


def _drawn(labels: np.ndarray, count: int, spec: PartitionSpec, seed: int) -> tuple[RowLists, str]:
    """Rows per client, and what was done in words."""
    if spec.name in ("iid", "noise"):
        return iid(len(labels), count, seed), "IID"
    if spec.balanced and spec.capped:
        raise UserError(
            "partition.balanced=true gives every client as many rows, so that partition.capped=true has "
            "nothing to cut: set one of them to false."
        )
    if spec.name == "dirichlet" and not spec.balanced:
        return dirichlet(labels, count, spec, (seed, DIRICHLET_STREAM))
    rng = np.random.default_rng([seed, RULES_STREAM])
    if spec.name == "dirichlet":
        clients, remark = rules.balanced_dirichlet(labels, count, spec.alpha, rng)
    elif spec.name == "labels":
        clients, remark = rules.by_labels(labels, count, spec.labels, rng)
    elif spec.name == "shards":
        clients, remark = rules.by_shards(labels, count, spec.shards, rng)
    else:
        clients, remark = rules.by_quantity(len(labels), count, spec.alpha, spec.min_size, rng)
    dealt = RowLists.of(clients).sorted()
    smallest = int(dealt.sizes.min())
    if smallest < spec.min_size:
        raise UserError(
            f"partition={spec.name} leaves a client with {counted(smallest, 'row')}, fewer than "
            f"partition.min_size={spec.min_size}: set that to {smallest} or less, or use fewer clients."
        )
    return dealt, remark


def _like(
    labels: np.ndarray, classes: Sequence[str], spec: PartitionSpec, num_clients: int | None, seed: int
) -> Partition:
    sites = read_census(spec.census)
    if num_clients not in (None, len(sites)):
        raise UserError(
            f"num_clients={num_clients} does not fit partition=like: the census has the classes of "
            f"{len(sites)} sites, so set num_clients={len(sites)} or leave it null."
        )
    (clients, remark), names = like(labels, classes, sites, np.random.default_rng([seed, RULES_STREAM]))
    short = [name for name, rows in zip(names, clients, strict=True) if len(rows) < spec.min_size]
    if short:
        raise UserError(
            f"partition=like leaves {short[0]} with fewer rows than partition.min_size={spec.min_size}: take "
            "a larger data set, or one with more rows of the census's classes, or set that lower."
        )
    indices = RowLists.of(clients).sorted()
    return Partition(indices, f"{remark}: {client_sizes(indices)}.", names)


def _checked_count(num_clients: int | None, min_size: int, rows: int) -> int:
    if num_clients is None or num_clients < 1:
        raise UserError(f"num_clients={num_clients} must be a whole number of at least 1.")
    if num_clients * min_size > rows:
        largest = rows // min_size
        remedy = f"set num_clients to {largest} or fewer" if largest else "use more data"
        if num_clients <= rows:
            remedy += f" or partition.min_size to {rows // num_clients} or less"
        raise UserError(
            f"{num_clients} clients of at least {min_size} examples need "
            f"{num_clients * min_size} train rows but the data set has {rows}: {remedy}."
        )
    return num_clients
