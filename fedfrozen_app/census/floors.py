"""What may leave of a table: no cell of fewer than `floor` people, nor what it could be worked out from.

A cell is small where it has some people, and fewer than the floor; or where so few are *not* in it. Small
cells are hidden, and others with them, smallest first, until there are at least two and together they have
`floor` people and one more for each further cell. Whoever takes the cells shown from the total then knows the
sum of those hidden, and of each of them nothing but that it is 1 to `floor` or more. Where the whole table
is not enough for that, all of it is withheld. Empty cells are shown: that a site has nobody of a class is
what a census is for.

Intervals are not hidden but joined with their neighbours, in halves of halves, so that the joints do not
depend on the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfrozen_app.census.cells import Moments, Table

Published = dict[str, Any]
LEAST_FLOOR = 3  # with a floor of 2, a small cell is always 1
DOMINANT = 0.5  # of the rows behind a mean, that one person may have


def hidden_cells(people: Sequence[int] | np.ndarray, everybody: int, floor: int) -> set[int] | None:
    """The cells that are not shown; None where nothing of the table may be."""
    counts = [int(count) for count in people]
    hidden = {
        cell
        for cell, count in enumerate(counts)
        if count and (count < floor or 0 < everybody - count < floor)
    }
    if not hidden:
        return set()
    order = sorted(
        (cell for cell, count in enumerate(counts) if count), key=lambda cell: (counts[cell], cell)
    )
    for cell in order:
        if enough(hidden, counts, floor):
            return hidden
        hidden.add(cell)
    return hidden if enough(hidden, counts, floor) else None


def enough(hidden: set[int], counts: Sequence[int], floor: int) -> bool:
    """Whether these cells hide each other."""
    return len(hidden) >= 2 and sum(counts[cell] for cell in hidden) >= floor + len(hidden) - 1


def joined_cells(table: Table, floor: int) -> list[tuple[int, int]] | None:
    """Intervals (first cell, one past the last) that may be shown; None where not even all together may."""

    def join(low: int, high: int) -> list[tuple[int, int]]:
        if high - low == 1:
            return [(low, high)]
        middle = (low + high) // 2
        parts = join(low, middle) + join(middle, high)
        return parts if all(sound(table, *part, floor) for part in parts) else [(low, high)]

    found = join(0, table.size)
    return found if all(sound(table, *part, floor) for part in found) else None


def sound(table: Table, low: int, high: int, floor: int) -> bool:
    """Whether these cells, as one, are nobody's or hide each other."""
    within = table.people_within(low, high)
    filled = len(np.unique(table.cell[(table.cell >= low) & (table.cell < high)]))
    return within == 0 or within >= floor + filled - 1


def publish(table: Table, floor: int) -> Published | None:
    """What leaves; None where nothing does."""
    if not table.everybody:
        return empty(table)
    if table.everybody < floor:
        return None
    if table.edges:
        groups = joined_cells(table, floor)
        return None if groups is None else joined(table, groups)
    hidden = hidden_cells(table.people(), table.everybody, floor)
    return None if hidden is None else named(table, hidden)


def empty(table: Table) -> Published:
    return joined(table, [(0, table.size)]) if table.edges else named(table, set())


def named(table: Table, hidden: set[int]) -> Published:
    """Cells by name; hidden ones by name only where everybody knows it."""
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
    """Intervals; the last one holds the rows without a value too, unless these stand apart (`none`)."""
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

    Where few people have rows without a number, the rows with one are not counted, and the figures rounded:
    the exact mean of whole numbers would tell their count.
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
