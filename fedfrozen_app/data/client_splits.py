"""A client's own test and validation rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition_spec import Partition
from fedfrozen_app.data.row_lists import NOBODY, RowLists, row_lists

VALIDATION_STREAM, TEST_STREAM = 3, 4  # of random draws; others are in partition_draws.py


def deal_test(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    indices: Sequence[np.ndarray],
    seed: int,
) -> RowLists:
    """Test rows per client, in the proportions of its train rows: each is (labels, groups) of a table.

    Within a group (a domain; one for all where the partition knows none) the test rows of a class go to the
    clients by their shares of the train rows of that class, rounded to whole rows so that every row is dealt.
    A row whose class no client of its group trains on goes to no client.
    """
    rng = np.random.default_rng([seed, TEST_STREAM])
    indices = row_lists(indices)
    cells, (train_cells, test_cells) = _numbered(train, test)
    known = np.flatnonzero(np.bincount(test_cells, minlength=len(cells)))
    tested = RowLists.of_owners(test_cells, len(cells))
    # For each cell the clients of its train rows, in order.
    trained = RowLists.of_owners(train_cells[indices.rows], len(cells), indices.owner_of_each)
    owners = np.full(len(test_cells), NOBODY, dtype=np.int64)
    for cell in sorted(known.tolist(), key=cells.__getitem__):
        rows = rng.permutation(tested[cell])
        clients, counts = np.unique(trained[cell], return_counts=True)
        if not len(clients):
            continue
        ends = np.round(np.cumsum(counts) / counts.sum() * len(rows)).astype(np.int64)
        owners[rows] = np.repeat(clients, np.diff(ends, prepend=0))
    return RowLists.of_owners(owners, len(indices))


def _numbered(*tables: tuple[np.ndarray, np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
    """The combinations of a label and a group, in words, and for each table the number of each row's one."""
    groups: dict[str, int] = {}  # a whole number of one table is the word for it of another
    pairs = []
    for labels, values in tables:
        known, places = values, np.arange(len(values))
        if values.dtype.kind != "O":
            known, places = np.unique(values, return_inverse=True)
        numbers = [groups.setdefault(str(one), len(groups)) for one in known.tolist()]
        pairs.append((labels, np.array(numbers, dtype=np.int64)[places]))
    names, width = list(groups), max(len(groups), 1)
    codes = [np.asarray(labels, dtype=np.int64) * width + numbers for labels, numbers in pairs]
    cells, places = np.unique(np.concatenate(codes), return_inverse=True)
    words = [f"{cell // width}/{names[cell % width]}" for cell in cells.tolist()]
    return words, np.split(places, np.cumsum([len(own) for own in codes])[:-1])


def label_counts(labels: np.ndarray, partition: Partition, num_classes: int) -> np.ndarray:
    """How many rows of each class each client holds: (clients, classes)."""
    return partition.indices.counts(labels, num_classes)


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
    rng = np.random.default_rng([*seed_key, VALIDATION_STREAM])
    order = rng.permutation(len(index))
    order = order[np.argsort(labels[index[order]], kind="stable")]
    # Evenly spaced picks from rows in class order: every class gives its share, rounded.
    picks = ((np.arange(size) + rng.random()) * (len(index) / size)).astype(np.int64)
    chosen = np.zeros(len(index), dtype=bool)
    chosen[order[picks]] = True
    return index[~chosen], index[chosen]
