"""What may leave of a table: no cell of fewer than `floor` people, nor what it could be worked out from.

A cell is small where it has some people, and fewer than the floor; or where so few are *not* in it. A small
cell is joined with its neighbour, and where both together are still too few, with the next two: in halves of
halves, so that with whom a cell is joined does not depend on the counts. (Hiding the smallest cell beside a
small one would reveal that the others are larger: trying all tables shows that this gives cells away.)
Cells that are joined have `floor` people together, and one more for each further cell that is not empty:
their sum reveals about each of them only that it is 1 to `floor` or more. Where the whole
table is not enough for that, all of it is withheld.

Intervals are released as joined. Cells with names are hidden instead, and of all of them only the sum is
known: what the total leaves over. Empty ones are shown, because a census must find out that a site has no
rows of a class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedfrozen_app.census.cells import Moments, Table

Published = dict[str, Any]
Groups = list[tuple[int, int]]  # first cell, one past the last
LEAST_FLOOR = 3  # with a floor of 2, a small cell is always 1
DOMINANT = 0.5  # of the rows behind a mean, that one person may have


def joined_cells(table: Table, floor: int) -> Groups | None:
    """Which cells are released as one; None where not even all together may be."""

    @cache  # the same parts are asked for at every level
    def releasable(low: int, high: int) -> bool:
        return sound(table, low, high, floor)

    def join(low: int, high: int) -> Groups:
        if high - low == 1:
            return [(low, high)]
        middle = (low + high) // 2
        parts = join(low, middle) + join(middle, high)
        return parts if all(releasable(*part) for part in parts) else [(low, high)]

    found = join(0, table.size)
    return found if all(releasable(*part) for part in found) else None


def sound(table: Table, low: int, high: int, floor: int) -> bool:
    """Whether these cells, as one, are empty or hide each other, and do not hold nearly all people."""
    within = table.people_within(low, high)
    filled = int(np.count_nonzero(table.people()[low:high]))
    return within == 0 or (within >= floor + filled - 1 and not 0 < table.total_people - within < floor)


def hidden_cells(table: Table, groups: Groups) -> set[int]:
    """Of a table with names: those that share a group with others, but for empty ones."""
    people = table.people()
    return {cell for low, high in groups if high - low > 1 for cell in range(low, high) if people[cell]}


def publish(table: Table, floor: int) -> Published | None:
    """What leaves; None where nothing does."""
    if not table.total_people:
        return empty(table)
    if table.total_people < floor:
        return None
    groups = joined_cells(table, floor)
    if groups is None:
        return None
    return joined(table, groups) if table.edges else named(table, hidden_cells(table, groups))


def empty(table: Table) -> Published:
    return joined(table, [(0, table.size)]) if table.edges else named(table, set())


def named(table: Table, hidden: set[int]) -> Published:
    """Cells by name; hidden ones by name only where the name is public."""
    people, rows = table.people(), table.rows()
    shown = [cell for cell in range(table.size) if cell not in hidden]
    return {
        "total": plain(rows.sum()),
        "people": {table.names[cell]: int(people[cell]) for cell in shown},
        "rows": {table.names[cell]: plain(rows[cell]) for cell in shown},
        "hidden": sorted(table.names[cell] for cell in hidden if cell < table.public),
        "others_hidden": any(cell >= table.public for cell in hidden),
    }


def joined(table: Table, groups: list[tuple[int, int]]) -> Published:
    """Intervals; the last one holds the rows without a value too, unless these are separate (`none`)."""
    rows, last = table.rows(), table.size - 1
    apart = groups[-1] == (last, last + 1)
    if apart:
        groups = groups[:-1]
    found: Published = {
        "edges": [plain(table.edges[low]) for low, _ in groups] + [plain(table.edges[-1])],
        "people": [table.people_within(low, high) for low, high in groups],
        "rows": [plain(rows[low:high].sum()) for low, high in groups],
    }
    none = {"people": table.people_within(last, last + 1), "rows": plain(rows[last])}
    return found | {"none": none if apart else None}


def publish_moments(found: Moments, floor: int) -> Published | None:
    """Mean and variance of the rows; nothing where few people, or one of them for the most part, are behind.

    Where few people have rows without a number, the rows with one are not counted, and mean and variance are
    rounded: the exact mean of whole numbers would reveal their count.
    """
    if not len(found.person):
        return None
    _, times = np.unique(found.person, return_counts=True)
    if len(times) < floor or (floor > 1 and times.max() > DOMINANT * len(found.person)):
        return None
    mean, variance = float(found.value.mean()), float(found.value.var())
    if 0 < found.lacking < floor:
        return {"rows": None, "people": None, "mean": rough(mean), "variance": rough(variance)}
    return {"rows": len(found.person), "people": len(times), "mean": mean, "variance": variance}


def rough(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


def plain(value: float) -> float | int:
    """Whole numbers as such; shares to nine digits."""
    return int(value) if float(value).is_integer() else round(float(value), 9)
