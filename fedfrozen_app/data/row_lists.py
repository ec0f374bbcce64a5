"""Which client has which rows: two arrays, however many clients there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

NOBODY = -1


class RowLists(Sequence[np.ndarray]):
    """The row numbers of each client, read as a sequence of arrays.

    All lists lie one after another in `rows`, those of client c from `offsets[c]` up to `offsets[c + 1]`. A
    client's array is made when it is asked for: a list of a million small arrays would take more memory than
    the rows themselves.
    """

    def __init__(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        self.rows, self.offsets = rows, offsets

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> RowLists:
        parts = [np.asarray(rows, dtype=np.int64) for rows in lists]
        whole = np.concatenate(parts) if parts else np.arange(0)
        return cls(_narrow(whole), _offsets(np.array([len(rows) for rows in parts], dtype=np.int64)))

    @classmethod
    def of_owners(cls, owners: np.ndarray, count: int, rows: np.ndarray | None = None) -> RowLists:
        """Of the client that each row belongs to (`NOBODY`: none), the rows in their order. `rows`: their
        numbers, where they are not 0, 1, 2, ..."""
        owned = owners != NOBODY
        sizes = np.bincount(owners[owned], minlength=count)
        in_order = bool((owners[1:] >= owners[:-1]).all())
        places = np.arange(len(owners)) if in_order else np.argsort(owners, kind="stable")
        places = places[len(owners) - int(sizes.sum()) :]  # nobody's come first
        return cls(_narrow(places if rows is None else rows[places]), _offsets(sizes))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return tuple(self[number] for number in range(*client.indices(len(self))))
        number = int(client) + len(self) if client < 0 else int(client)
        if not 0 <= number < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.rows[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """How many rows each client has."""
        return np.diff(self.offsets)

    @property
    def owner_of_each(self) -> np.ndarray:
        """The client of each of `rows`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def owners(self, rows: int) -> np.ndarray:
        """The client of each row of a table of so many, or `NOBODY`: the inverse of `of_owners`."""
        found = np.full(rows, NOBODY, dtype=np.int64)
        found[self.rows] = self.owner_of_each
        return found

    def sorted(self) -> RowLists:
        """The same rows, each client's in ascending order."""
        order = np.lexsort((self.rows, self.owner_of_each))
        return RowLists(self.rows[order], self.offsets)

    def counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """How many rows of each class each client has: (clients, classes)."""
        cells = self.owner_of_each * classes + labels[self.rows]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)


def row_lists(lists: Sequence[np.ndarray]) -> RowLists:
    return lists if isinstance(lists, RowLists) else RowLists.of(lists)


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `numpy.unique` finds: the values in order, where each is first, and of every element the number of
    its value. Without sorting where they are in order, as the rows of a table by its users."""
    new = np.empty(len(values), dtype=bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    if len(values) and not (values[1:] >= values[:-1]).all():
        return np.unique(values, return_index=True, return_inverse=True)
    first = np.flatnonzero(new)
    return values[first], first, np.cumsum(new) - 1


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _narrow(rows: np.ndarray) -> np.ndarray:
    """In half the memory, where the numbers fit."""
    fits = not len(rows) or int(rows.max()) <= np.iinfo(np.int32).max
    return rows.astype(np.int32 if fits else np.int64)
