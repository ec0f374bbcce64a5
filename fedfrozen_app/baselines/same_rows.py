"""The rows of a run for plain models: those of all clients together, and the test rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedfrozen_app.config import Config, excluded_clients
from fedfrozen_app.data.federated import Shares, dataset_of, spec_of
from fedfrozen_app.data.partition_spec import Partition
from fedfrozen_app.data.sources import prepare
from fedfrozen_app.data.table import Corpus

MOST_ROWS = 10_000  # train rows, if fitting must take seconds
MOST_VALUES = 8_000_000  # pixels or characters of these
UNASKED = 5  # factor by which the default uses less: a second or two


@dataclass(frozen=True)
class SameRows:
    task: str
    train: Any  # texts, lists of words, or pictures (rows, channels, height, width)
    train_labels: Any  # numbers (rows,), 0 and 1 (rows, classes), or lists of tags
    test: Any
    test_labels: Any
    of: int  # number of all train rows
    # For a table: the indices of each client's rows among the train rows, by the client's name.
    sites: dict[str, np.ndarray] = field(default_factory=dict)


def same_rows(config: Config, corpus: Corpus, shares: Shares, *, quick: bool) -> SameRows | None:
    """The rows; None if there is nothing to learn from, or, with `quick`, too much to read again."""
    if shares.partition is None or not len(corpus.test):
        return None
    left_out = excluded_clients(config)
    indices = shares.partition.indices
    excluded = np.isin(indices.owner_of_each, [int(client) for client in left_out])
    index = np.sort(indices.rows[~excluded].astype(np.int64))
    parts = {} if quick else _by_client(shares.partition, left_out)
    train: Any
    test: Any
    if corpus.preprocessing is not None:
        return _of_table(config, corpus, parts, index, quick=quick)
    if corpus.task == "image":
        pictures = corpus.train.inputs["pixel_values"]
        chosen = few(index, pictures[0].numel(), config) if quick else index
        train, test = (each.cpu().numpy() for each in (pictures[chosen], corpus.test.inputs["pixel_values"]))
    else:
        rows = corpus.rows or (None if quick else prepare(spec_of(dataset_of(config), None)))
        if rows is None:
            return None
        size = rows.characters // max(len(rows.train.content) + len(rows.test.content), 1)
        chosen = few(index, size, config) if quick else index
        train, test = [rows.train.content[row] for row in chosen], rows.test.content
        if corpus.task == "tokens":
            tags = [rows.train.labels[row] for row in chosen]
            return SameRows(corpus.task, train, tags, test, rows.test.labels, len(index))
    labels = corpus.train.labels[chosen].numpy()
    if len(np.unique(labels)) < 2:
        return None
    return SameRows(corpus.task, train, labels, test, corpus.test.labels.numpy(), len(index))


def _by_client(partition: Partition, left_out: Collection[str]) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(part)
        for client, (name, part) in enumerate(zip(partition.names, partition.indices, strict=True))
        if str(client) not in left_out
    }


def _of_table(
    config: Config, corpus: Corpus, parts: Mapping[str, np.ndarray], index: np.ndarray, *, quick: bool
) -> SameRows | None:
    """Numbers and one-hot levels, as in the run's preprocessing."""
    assert corpus.preprocessing is not None
    levels, inputs = corpus.preprocessing.levels, corpus.train.inputs
    width = inputs["numbers"].shape[1] + sum(levels)
    labels = corpus.train.labels.numpy()
    chosen = few(index, width, config) if quick else index
    if len(np.unique(labels[chosen], axis=0)) < 2:
        return None
    sites = {} if quick else {name: np.searchsorted(index, np.sort(part)) for name, part in parts.items()}
    tested = corpus.test.labels.numpy()
    train = table_cells({name: value[chosen] for name, value in inputs.items()}, levels)
    test = table_cells(corpus.test.inputs, levels)
    return SameRows(corpus.task, train, labels[chosen], test, tested, len(index), sites)


def table_cells(inputs: Mapping[str, Tensor], levels: Sequence[int]) -> np.ndarray:
    """(rows, inputs)"""
    categories = inputs["categories"].numpy()
    each = [np.eye(count)[categories[:, column]] for column, count in enumerate(levels)]
    return np.concatenate([inputs["numbers"].numpy(), *each], axis=1)


def few(index: np.ndarray, size: int, config: Config) -> np.ndarray:
    """A subset of the rows on which a linear model takes seconds: the same one in every run on these data."""
    less = 1 if str(config.baseline).lower() == "true" else UNASKED
    most = max(min(MOST_ROWS, MOST_VALUES // max(size, 1)) // less, 100)
    if len(index) <= most:
        return index
    drawn = np.random.default_rng(config.dataset.split_seed).choice(index, most, replace=False)
    return np.sort(drawn)
