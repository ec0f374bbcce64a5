"""What may leave of a table: no cell of fewer than `floor` people, and nothing from which one can be derived.

A cell is small if it has some people but fewer than the floor, or if so few are *not* in it. A small cell is
joined with its neighbour, and if both together are still too few, with the next two: in halves of halves, so
that the choice of neighbours does not depend on the counts. (Hiding the smallest cell along with a small one
would reveal that the others are larger; enumerating all tables shows that this discloses cells.) Cells that
are joined have `floor` people together, and one more for each further cell that is not empty: their sum
reveals about each of them only that it is 1 to `floor` or more. If the whole table is not enough for that,
all of it is withheld.

Intervals are released as joined. Cells with names are hidden instead, and only their sum is known: the total
less the visible cells. Empty ones are shown, because a census must find out that a site has no rows of a
class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedfrozen_app.census.cells import Moments, Table

Published = dict[str, Any]
Groups = list[tuple[int, int]]  # first cell, one past the last
LEAST_FLOOR = 3  # with a floor of 2, a small cell is always 1
DOMINANT = 0.5  # largest share of a mean's rows that one person may have


def joined_cells(table: Table, floor: int) -> Groups | None:
    """Which cells are released as one; None if not even all of them together may be."""

    @cache  # every level queries the same ranges
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
    """Whether these cells, as one, are empty or hide each other, without holding nearly all people."""
    within = table.people_within(low, high)
    filled = int(np.count_nonzero(table.people()[low:high]))
    return within == 0 or (within >= floor + filled - 1 and not 0 < table.total_people - within < floor)


def hidden_cells(table: Table, groups: Groups) -> set[int]:
    """The hidden cells of a table with names: those that share a group with others, except empty ones."""
    people = table.people()
    return {cell for low, high in groups if high - low > 1 for cell in range(low, high) if people[cell]}


def publish(table: Table, floor: int) -> Published | None:
    """The released table; None if nothing may leave."""
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
    """Cells by name; hidden cells are named only if their name is public."""
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
    """Intervals; the last one includes the rows without a value, unless these are separate (`none`)."""
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
    """Mean and variance of the rows; None if they come from few people, or mostly from one of them.

    If few people have rows without a number, the count of rows with one is withheld, and mean and variance
    are rounded: the exact mean of integers would reveal their count.
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
    """Rounded to two digits."""
    return float(f"{value:.2g}")


def plain(value: float) -> float | int:
    """Integers unchanged; fractions to nine digits."""
    return int(value) if float(value).is_integer() else round(float(value), 9)
