"""The tables of a census: people by cell, and means. floors.py decides what of them may leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Table:
    """People by cell: one line per person and cell in which they have rows.

    With `edges` the cells are consecutive intervals, followed by one cell for rows without a value;
    neighbours may be joined, and the first and last are open. Otherwise cells have names. The first `public`
    names are public knowledge; others occur only in the data, and leave the site only if enough people have
    them. Rows without a value need a cell too: all rows less those with a value would reveal them.

    `by_person` means that no person's cells depend on another person's rows. Only such tables are noised:
    adding or removing one person adds or removes her lines, and changes no others.
    """

    name: str
    person: np.ndarray  # (lines,)
    cell: np.ndarray  # (lines,)
    weight: np.ndarray  # (lines,) rows, or sums of shares of pictures
    names: tuple[str, ...] = ()
    public: int = 0  # number of public names, which come first
    edges: tuple[float, ...] = ()
    by_person: bool = False

    @property
    def size(self) -> int:
        return len(self.edges) if self.edges else len(self.names)

    def people(self) -> np.ndarray:
        """(cells,) of people."""
        return self._people

    @cached_property
    def _people(self) -> np.ndarray:
        return np.bincount(self.cell, minlength=self.size)

    @cached_property
    def _by_cell(self) -> tuple[np.ndarray, np.ndarray]:
        """(cell, person) of each line, by cell."""
        order = np.argsort(self.cell, kind="stable")
        return self.cell[order], self.person[order]

    def rows(self) -> np.ndarray:
        """(cells,) of rows."""
        return np.bincount(self.cell, weights=self.weight, minlength=self.size)

    def people_within(self, low: int, high: int) -> int:
        """People in any of the cells [low, high), each counted once."""
        cells, people = self._by_cell  # cached, because callers query many ranges
        first, last = np.searchsorted(cells, (low, high))
        return len(np.unique(people[first:last]))

    @cached_property
    def total_people(self) -> int:
        return len(np.unique(self.person))

    def members(self) -> dict[int, dict[str, float]]:
        """Each person's weight by cell, with which a later census is compared."""
        found: dict[int, dict[str, float]] = {}
        key = self.names if not self.edges else tuple(map(str, range(self.size)))
        for person, cell, weight in zip(
            self.person.tolist(), self.cell.tolist(), self.weight.tolist(), strict=True
        ):
            found.setdefault(person, {})[key[cell]] = weight
        return found


@dataclass(frozen=True)
class Moments:
    """A number for some rows: its mean and variance, from sums over people."""

    name: str
    person: np.ndarray  # (rows with a number,)
    value: np.ndarray  # (rows with a number,)
    lacking: int  # people with a row without a number


def moments(name: str, people: np.ndarray, value: np.ndarray) -> Moments:
    """`Moments` of these rows; NaN marks a missing number."""
    held = ~np.isnan(value)
    return Moments(name, people[held], value[held], len(np.unique(people[~held])))


def lines(
    person: np.ndarray, cell: np.ndarray, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(person, cell, weight) with every pair once and its weights summed."""
    weight = np.ones(len(person)) if weight is None else weight
    if not len(person):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros(0)
    width = int(cell.max()) + 1
    keys, place = np.unique(person.astype(np.int64) * width + cell, return_inverse=True)
    return keys // width, keys % width, np.bincount(place, weights=weight)


def by_name(
    name: str,
    person: Sequence[int] | np.ndarray,
    value: Sequence[str],
    public: Sequence[str] = (),
    *,
    other: str | None = None,
    by_person: bool = False,
) -> Table:
    """A table of names. Names that are not public go into the cell `other` if there is one."""
    known = list(dict.fromkeys([*public, *([other] if other is not None else [])]))
    place = {word: number for number, word in enumerate(known)}
    if other is None:
        for word in sorted(set(value) - set(place)):
            place[word] = len(place)
        cell = np.array([place[word] for word in value], dtype=np.int64)
    else:
        cell = np.array([place.get(word, place[other]) for word in value], dtype=np.int64)
    found = lines(np.asarray(person, dtype=np.int64), cell)
    return Table(name, *found, tuple(place), len(known), by_person=by_person)


def by_interval(
    name: str,
    person: np.ndarray,
    value: np.ndarray,
    edges: Sequence[float],
    weight: np.ndarray | None = None,
    *,
    by_person: bool = False,
) -> Table:
    """A table of numbers; those beyond the ends count in the first and last interval, NaN as missing."""
    place = np.searchsorted(np.asarray(edges, dtype=float), value, side="right") - 1
    cell = np.where(np.isnan(value), len(edges) - 1, np.clip(place, 0, len(edges) - 2))
    found = lines(np.asarray(person, dtype=np.int64), cell.astype(np.int64), weight)
    return Table(name, *found, edges=tuple(float(edge) for edge in edges), by_person=by_person)
