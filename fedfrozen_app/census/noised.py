"""A census with noise: epsilon-differential privacy for each person, whatever rows they have.

Every person counts once in each table, in the cell where they have most rows. Only tables in which no
person's cells depend on another's rows (`Table.by_person`) are released. Adding or removing one person then
changes one cell of each table by one, so two-sided geometric noise with parameter exp(-epsilon/tables) makes
all of them together epsilon-private, with delta 0 (Ghosh, Roughgarden and Sundararajan 2009; basic
composition). Means are not released: the server estimates them from the intervals. Nor are names that occur
only in the data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fedfrozen_app.census import floors
from fedfrozen_app.census.cells import Table, lines
from fedfrozen_app.census.measure import NONE, Measurements
from fedfrozen_app.privacy.keystream import Keystream


def release_with_noise(
    measured: Measurements, epsilon: float, stream: Keystream | None = None
) -> dict[str, Any]:
    stream = stream or Keystream()
    tables = tables_for_noise(measured)
    share = epsilon / len(tables)
    return {
        "tables": {table.name: _noised(table, share, stream) for table in tables},
        "moments": {found.name: None for found in measured.moments},
    }


def tables_for_noise(measured: Measurements) -> list[Table]:
    """The tables to noise, with each person once in each. Omits tables without public cells or
    `by_person`."""
    return [
        counted_once(table) for table in measured.tables if table.by_person and (table.edges or table.public)
    ]


def counted_once(table: Table) -> Table:
    """Each person in one public cell, with weight 1."""
    if not table.edges and table.public < table.size:
        none = table.names.index(NONE)
        cell = np.where(table.cell < table.public, table.cell, none)
        person, cell, weight = lines(table.person, cell, table.weight)
    else:
        person, cell, weight = table.person, table.cell, table.weight
    order = np.lexsort((cell, -weight, person))
    kept = order[np.unique(person[order], return_index=True)[1]]
    names = table.names[: table.public] if not table.edges else ()
    weight = np.ones(len(kept))
    return replace(table, person=person[kept], cell=cell[kept], weight=weight, names=names)


def _noised(table: Table, epsilon: float, stream: Keystream) -> dict[str, Any]:
    noise = geometric(table.size, epsilon, stream)
    counts = np.maximum(table.people() + noise, 0)
    if table.edges:
        groups = [(cell, cell + 1) for cell in range(table.size)]
        released = floors.joined(table, groups)
        values = [int(count) for count in counts]
        return released | {
            "people": values[:-1],
            "rows": values[:-1],
            "none": {"people": values[-1], "rows": values[-1]},
        }
    by_name = {name: int(count) for name, count in zip(table.names, counts, strict=True)}
    total = int(counts.sum())
    return {"total": total, "people": by_name, "rows": by_name, "hidden": [], "others_hidden": False}


def geometric(count: int, epsilon: float, stream: Keystream) -> np.ndarray:
    """(count,) integers with P(k) ~ exp(-epsilon·|k|): the difference of two geometric variables."""
    drawn = 1.0 - stream.uniform(2 * count)  # in (0, 1]
    tails = np.floor(np.log(drawn) / -epsilon)  # P(at least k) = exp(-epsilon·k)
    return (tails[:count] - tails[count:]).astype(np.int64)


def spread(epsilon: float, tables: int) -> float:
    """The standard deviation of a cell's noise."""
    decay = math.exp(-epsilon / tables)
    return math.sqrt(2 * decay) / (1 - decay)
