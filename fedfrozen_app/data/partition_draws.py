"""IID and Dirichlet draws, which always terminate: the rows of flwr-datasets' partitioners for the same seed.

flwr-datasets itself is what the tests compare with. Importing it brings pyarrow, pandas and two plotting
libraries, which takes as long as importing torch. Its Dirichlet partitioner also gives up when a client stays
below the minimum size; here the shortfall is then moved from other clients, and the note states it.
"""

from __future__ import annotations

import numpy as np

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data import partition_rules as rules
from fedfrozen_app.data.partition_spec import PartitionSpec
from fedfrozen_app.data.row_lists import RowLists

# Each purpose draws from its own stream, so that one more draw here never shifts another.
IID_STREAM, DIRICHLET_STREAM, RULES_STREAM = 1, 2, 5
DRAWS = 11  # for the minimum size, as in flwr-datasets


LARGE = 20_000  # clients; from here on rows move to small clients by another rule: see `_topped_up`


def iid(rows: int, count: int, seed: int) -> RowLists:
    shuffled = np.random.default_rng([seed, IID_STREAM]).permutation(rows)
    sizes = np.full(count, rows // count)
    sizes[: rows % count] += 1
    owners = np.empty(rows, dtype=np.int64)
    owners[shuffled] = np.repeat(np.arange(count), sizes)
    return RowLists.of_owners(owners, count)


def dirichlet(
    labels: np.ndarray, count: int, spec: PartitionSpec, key: tuple[int, ...]
) -> tuple[RowLists, str]:
    """Rows per client, and what was done in words."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    title = f"Dirichlet({spec.alpha:g}){', capped' if spec.capped else ''}"
    rng = np.random.default_rng(seed)
    for number in range(1, (1 if count > LARGE else DRAWS) + 1):
        owners = _draw(labels, count, spec, rng)
        if np.bincount(owners, minlength=count).min() >= spec.min_size:
            drawn = RowLists.of_owners(owners, count)
            return drawn, title + (f", drawn {number} times for the minimum size" if number > 1 else "")
    if count > LARGE:
        return _topped_up(labels, owners, count, spec, rng, title)
    # None was large enough everywhere: the first draw, and what is short moves to its clients by chance.
    rng = np.random.default_rng(seed)
    owners = _draw(labels, count, spec, rng)
    ordered = np.lexsort((labels, owners))
    first = [
        part.tolist() for part in np.split(ordered, np.cumsum(np.bincount(owners, minlength=count))[:-1])
    ]
    for client in first:
        rng.shuffle(client)  # a list's order comes of other random numbers than an array's
    first = [np.array(client, dtype=np.int64) for client in first]
    short = sum(len(client) < spec.min_size for client in first)
    filled, moved = rules.fill_up(first, labels, spec.min_size)
    before, after = rules.label_entropy(first, labels), rules.label_entropy(filled, labels)
    title += (
        f" left {short} of {count} clients under {spec.min_size} examples; "
        f"moved {counted(moved, 'example')} ({moved / len(labels):.0%}) to them, each time of one class "
        "and one client where there were enough; "
        f"mean label entropy {before:.2f} as drawn, {after:.2f} now"
    )
    return RowLists.of(filled).sorted(), title


def _topped_up(
    labels: np.ndarray,
    owners: np.ndarray,
    count: int,
    spec: PartitionSpec,
    rng: np.random.Generator,
    title: str,
) -> tuple[RowLists, str]:
    """Of more than `LARGE` clients: what each has above the minimum, in a random order, goes to the clients
    that are short of it. Choosing the best donor for each client takes their number squared."""
    before = rules.entropy_of(RowLists.of_owners(owners, count), labels)
    sizes = np.bincount(owners, minlength=count)
    order = rng.permutation(len(labels))
    order = order[np.argsort(owners[order], kind="stable")]
    ranks = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    need = np.maximum(spec.min_size - sizes, 0)
    spare = rng.permutation(order[ranks >= spec.min_size])[: need.sum()]
    owners[spare] = np.repeat(np.arange(count), need)
    filled = RowLists.of_owners(owners, count)
    title += (
        f" left {(need > 0).sum()} of {count} clients under {spec.min_size} examples; "
        f"moved {counted(len(spare), 'example')} ({len(spare) / len(labels):.0%}) to them, drawn from what "
        "others had above that; "
        f"mean label entropy {before:.2f} as drawn, {rules.entropy_of(filled, labels):.2f} now"
    )
    return filled, title


def _draw(labels: np.ndarray, count: int, spec: PartitionSpec, rng: np.random.Generator) -> np.ndarray:
    """The client of each row, class by class: each class is cut by shares drawn from Dirichlet(α, ..., α)."""
    owners = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(count, dtype=np.int64)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        shares = rng.dirichlet(np.full(count, float(spec.alpha)))
        if spec.capped:  # a client that has more than the average gets no more
            shares[sizes > len(labels) / count] = 0
            if total := sum(shares.tolist()):
                shares = shares / total
        ends = (np.cumsum(shares) * len(rows)).astype(np.int64)[:-1]
        owners[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")
        sizes += np.bincount(owners[rows], minlength=count)
    return owners
