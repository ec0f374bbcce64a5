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

# Each purpose draws from its own stream, so that one more draw here never shifts another.
IID_STREAM, DIRICHLET_STREAM, RULES_STREAM = 1, 2, 5
DRAWS = 11  # for the minimum size, as in flwr-datasets


def iid(rows: int, count: int, seed: int) -> tuple[np.ndarray, ...]:
    shuffled = np.random.default_rng([seed, IID_STREAM]).permutation(rows)
    return tuple(np.sort(shard) for shard in np.array_split(shuffled, count))


def dirichlet(
    labels: np.ndarray, count: int, spec: PartitionSpec, key: tuple[int, ...]
) -> tuple[tuple[np.ndarray, ...], str]:
    """Rows per client, and what was done in words."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    title = f"Dirichlet({spec.alpha:g}){', capped' if spec.capped else ''}"
    rng = np.random.default_rng(seed)
    for number in range(1, DRAWS + 1):
        clients = _draw(labels, count, spec, rng)
        if min(map(len, clients)) >= spec.min_size:
            clients = tuple(np.sort(client) for client in clients)
            return clients, title + (f", drawn {number} times for the minimum size" if number > 1 else "")
    # None was large enough everywhere: the first draw, and what is short moves to its clients by chance.
    rng = np.random.default_rng(seed)
    first = [client.tolist() for client in _draw(labels, count, spec, rng)]
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
    return tuple(np.sort(client) for client in filled), title


def _draw(
    labels: np.ndarray, count: int, spec: PartitionSpec, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Rows per client, class by class: each class is cut by shares drawn from Dirichlet(α, ..., α)."""
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
    return tuple(np.split(np.lexsort((labels, owners)), np.cumsum(sizes)[:-1]))
