"""A client's own test and validation rows."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition_spec import Partition

VALIDATION_STREAM, TEST_STREAM = 3, 4  # of random draws; others are in partition_draws.py


def deal_test(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    indices: tuple[np.ndarray, ...],
    seed: int,
) -> tuple[np.ndarray, ...]:
    """Test rows per client, in the proportions of its train rows: each is (labels, groups) of a table.

    Within a group (a domain; one for all where the partition knows none) the test rows of a class go to the
    clients by their shares of the train rows of that class, rounded to whole rows so that every row is dealt.
    A row whose class no client of its group trains on goes to no client.
    """
    rng = np.random.default_rng([seed, TEST_STREAM])
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
    rng = np.random.default_rng([*seed_key, VALIDATION_STREAM])
    order = rng.permutation(len(index))
    order = order[np.argsort(labels[index[order]], kind="stable")]
    # Evenly spaced picks from rows in class order: every class gives its share, rounded.
    picks = ((np.arange(size) + rng.random()) * (len(index) / size)).astype(np.int64)
    chosen = np.zeros(len(index), dtype=bool)
    chosen[order[picks]] = True
    return index[~chosen], index[chosen]
