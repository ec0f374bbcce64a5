"""Who holds which rows: train rows dealt to clients, in a way that always ends.

Where flwr-datasets has a draw that deals every row, it is used. Its Dirichlet partitioner gives up when a
client stays below the minimum size; here the shortfall is then moved from other clients, and the note says
so. flwr-datasets is imported where it is used: its plotting libraries cost two seconds, which a deployed
site with data of its own would pay for every message.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset

from fedfrozen_app.data import partition_rules as rules
from fedfrozen_app.data.partition_like import like, read_census
from fedfrozen_app.errors import UserError
from fedfrozen_app.words import counted

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

DRAWN = ("dirichlet", "iid", "labels", "shards", "quantity", "noise")  # for any number of clients
NAMES = (*DRAWN, "natural", "domain", "file", "like")

FILE_COLUMN = "client of the file"  # among the columns, where a file names each row's client

# Each purpose draws from its own stream, so that one more draw here never shifts another.
_IID, _DIRICHLET, _VALIDATION, _TEST, _RULES = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class PartitionSpec:
    name: str = "dirichlet"  # one of NAMES
    alpha: float = 0.3  # Dirichlet concentration: small is skewed, large is even
    column: str | None = None  # for natural and domain; None: the obvious one
    min_size: int = 10  # rows that a drawn client holds at least
    clients_per_domain: int = 1
    labels: int = 2  # classes of a client, for labels
    shards: int = 2  # of a client, for shards
    balanced: bool = False  # dirichlet: equal sizes
    capped: bool = False  # dirichlet: whoever has its share of rows gets none of the classes that follow
    noise: float = 0.0  # standard deviation of the noisiest client's pictures (partition_noise.py)
    path: str | None = None  # for file (partition_file.py)
    census: str | None = None  # for like (partition_like.py)


@dataclass(frozen=True)
class Partition:
    """Train row numbers per client, sorted; together every row exactly once (with `like`: or never)."""

    indices: tuple[np.ndarray, ...]
    note: str
    names: tuple[str, ...]


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
        return _by_column(labels, columns, spec, num_clients, seed)

    count = _checked_count(num_clients, spec.min_size, len(labels))
    names = tuple(str(client) for client in range(count))
    indices, remark = _drawn(labels, count, spec, seed)
    if spec.noise:
        remark += f", with noise up to {spec.noise:g} of the pixels' range"
    return Partition(indices, f"{remark}: {_sizes(indices)}.", names)


def _drawn(
    labels: np.ndarray, count: int, spec: PartitionSpec, seed: int
) -> tuple[tuple[np.ndarray, ...], str]:
    """Rows per client, and what was done in words."""
    if spec.name in ("iid", "noise"):
        return _iid(len(labels), count, seed), "IID"
    if spec.balanced and spec.capped:
        raise UserError(
            "partition.balanced=true gives every client as many rows, so that partition.capped=true has "
            "nothing to cut: set one of them to false."
        )
    if spec.name == "dirichlet" and not spec.balanced:
        return _dirichlet(labels, count, spec, (seed, _DIRICHLET))
    rng = np.random.default_rng([seed, _RULES])
    if spec.name == "dirichlet":
        clients, remark = rules.balanced_dirichlet(labels, count, spec.alpha, rng)
    elif spec.name == "labels":
        clients, remark = rules.by_labels(labels, count, spec.labels, rng)
    elif spec.name == "shards":
        clients, remark = rules.by_shards(labels, count, spec.shards, rng)
    else:
        clients, remark = rules.by_quantity(len(labels), count, spec.alpha, spec.min_size, rng)
    smallest = min(len(rows) for rows in clients)
    if smallest < spec.min_size:
        raise UserError(
            f"partition={spec.name} leaves a client with {counted(smallest, 'row')}, fewer than "
            f"partition.min_size={spec.min_size}: set that to {smallest} or less, or use fewer clients."
        )
    return tuple(np.sort(rows) for rows in clients), remark


def _like(
    labels: np.ndarray, classes: Sequence[str], spec: PartitionSpec, num_clients: int | None, seed: int
) -> Partition:
    sites = read_census(spec.census)
    if num_clients not in (None, len(sites)):
        raise UserError(
            f"num_clients={num_clients} does not fit partition=like: the census has the classes of "
            f"{len(sites)} sites, so set num_clients={len(sites)} or leave it null."
        )
    (clients, remark), names = like(labels, classes, sites, np.random.default_rng([seed, _RULES]))
    short = [name for name, rows in zip(names, clients, strict=True) if len(rows) < spec.min_size]
    if short:
        raise UserError(
            f"partition=like leaves {short[0]} with fewer rows than partition.min_size={spec.min_size}: take "
            "a larger data set, or one with more rows of the census's classes, or set that lower."
        )
    indices = tuple(np.sort(rows) for rows in clients)
    return Partition(indices, f"{remark}: {_sizes(indices)}.", names)


def grouping_column(columns: Mapping[str, np.ndarray], spec: PartitionSpec) -> str | None:
    """The column whose values this partition keeps apart, if it divides by one."""
    return None if spec.name in (*DRAWN, "like") else _column_name(columns, spec)


def deal_test(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    indices: tuple[np.ndarray, ...],
    seed: int,
) -> tuple[np.ndarray, ...]:
    """Test rows per client, in the proportions of its train rows: each is (labels, groups) of a table.

    Within a group (a domain; one for all where the partition knows none) the test rows of a class go to the
    clients by their shares of the train rows of that class, rounded to whole rows so that every row is dealt.
    A row whose class nobody trains on in its group goes to no one.
    """
    rng = np.random.default_rng([seed, _TEST])
    dealt: list[list[np.ndarray]] = [[] for _ in indices]
    found: dict[str, list[int]] = {}
    for row, (label, group) in enumerate(zip(*test, strict=True)):
        found.setdefault(f"{label}/{group}", []).append(row)
    train_keys = np.array([f"{label}/{group}" for label, group in zip(*train, strict=True)], dtype=object)
    counters = [Counter(train_keys[rows].tolist()) for rows in indices]
    for key in sorted(found):
        rows = rng.permutation(found[key])
        counts = np.array([counter[key] for counter in counters], dtype=np.float64)
        if not counts.sum():
            continue
        ends = np.round(np.cumsum(counts) / counts.sum() * len(rows)).astype(np.int64)
        for client, part in enumerate(np.split(rows, ends[:-1])):
            dealt[client].append(part)
    return tuple(np.sort(np.concatenate(parts)) if parts else np.arange(0) for parts in dealt)


def label_counts(labels: np.ndarray, partition: Partition, num_classes: int) -> np.ndarray:
    """How many rows of each class each client holds: (clients, classes)."""
    return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in partition.indices])


def split_validation(
    index: np.ndarray, labels: np.ndarray, fraction: float, seed_key: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """One client's rows as (train, validation), the classes in the same shares in both.

    ``labels`` are those of the whole train table. A fraction above 0 gives at least one validation
    row where the client has two, and always leaves one to train on.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"The validation fraction {fraction} must be at least 0 and below 1.")
    size = min(max(1, round(fraction * len(index))), len(index) - 1) if fraction else 0
    if size <= 0:
        return index, index[:0]
    rng = np.random.default_rng([*seed_key, _VALIDATION])
    order = rng.permutation(len(index))
    order = order[np.argsort(labels[index[order]], kind="stable")]
    # Evenly spaced picks from rows in class order: every class gives its share, rounded.
    picks = ((np.arange(size) + rng.random()) * (len(index) / size)).astype(np.int64)
    chosen = np.zeros(len(index), dtype=bool)
    chosen[order[picks]] = True
    return index[~chosen], index[chosen]


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


def _load_all(partitioner: Partitioner, dataset: Dataset) -> list[np.ndarray]:
    partitioner.dataset = dataset
    parts = (partitioner.load_partition(n) for n in range(partitioner.num_partitions))
    return [np.array(part[:]["index"], dtype=np.int64) for part in parts]


def _iid(rows: int, count: int, seed: int) -> tuple[np.ndarray, ...]:
    from flwr_datasets.partitioner import IidPartitioner  # lazy: see the module's docstring

    # IidPartitioner cuts contiguous shards, so the shuffle has to happen before.
    shuffled = np.random.default_rng([seed, _IID]).permutation(rows)
    shards = _load_all(IidPartitioner(count), Dataset.from_dict({"index": shuffled}))
    return tuple(np.sort(shard) for shard in shards)


def _dirichlet(
    labels: np.ndarray, count: int, spec: PartitionSpec, key: tuple[int, ...]
) -> tuple[tuple[np.ndarray, ...], str]:
    """Rows per client, and what was done in words."""
    from flwr_datasets.partitioner import DirichletPartitioner

    dataset = Dataset.from_dict({"index": np.arange(len(labels)), "label": labels})
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])

    def draw(min_size: int) -> list[np.ndarray]:
        partitioner = DirichletPartitioner(
            count,
            "label",
            float(spec.alpha),
            min_partition_size=min_size,
            self_balancing=spec.capped,
            seed=seed,
        )
        return _load_all(partitioner, dataset)

    title = f"Dirichlet({spec.alpha:g}){', capped' if spec.capped else ''}"
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            clients, out_of_patience = draw(spec.min_size), False
        except ValueError:  # it gives up after its tenth draw; every other cause is checked above
            clients, out_of_patience = draw(0), True
    if out_of_patience:
        short = sum(len(client) < spec.min_size for client in clients)
        drawn = rules.label_entropy(clients, labels)
        clients, moved = rules.fill_up(clients, labels, spec.min_size)
        title += (
            f" left {short} of {count} clients under {spec.min_size} examples; "
            f"moved {counted(moved, 'example')} ({moved / len(labels):.0%}) to them, each time of one class "
            f"and one client where there were enough; mean label entropy {drawn:.2f} as drawn, "
            f"{rules.label_entropy(clients, labels):.2f} now"
        )
    elif complaints:
        title += f", drawn {len(complaints) + 1} times for the minimum size"
    return tuple(np.sort(client) for client in clients), title


def _by_column(
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
            parts, remark = _dirichlet(labels[rows], per_group, spec, (seed, _DIRICHLET, number))
            note += f"; {value}: {remark}"
            indices += [rows[part] for part in parts]
            names += [f"{value}/{part}" for part in range(per_group)]
    small = [name for name, rows in zip(names, indices, strict=True) if len(rows) < spec.min_size]
    note += f": {_sizes(indices)}"
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
    from flwr_datasets.partitioner import NaturalIdPartitioner

    partitioner = NaturalIdPartitioner("value")
    dataset = Dataset.from_dict({"index": np.arange(len(values)), "value": values.tolist()})
    # NaturalIdPartitioner shows a progress bar that cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        groups = _load_all(partitioner, dataset)
    ids = partitioner.partition_id_to_natural_id
    return {str(ids[number]): rows for number, rows in enumerate(groups)}


def _sizes(indices: tuple[np.ndarray, ...] | list[np.ndarray]) -> str:
    sizes = [len(rows) for rows in indices]
    spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    return f"{counted(len(sizes), 'client')} with {spread} examples"
