"""How a table's cells become numbers, by a census of the sites: no row was seen by anybody else.

A column that the census counted between edges is numeric: its mean and deviation are exact where sites gave
their sums, else those of its intervals' middles, and its median lies within its interval. A column counted by
words has these levels, but for words that nobody has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NUMBERS, WORDS = "numbers/", "words/"
APART = ("other", "(none)")  # cells for words that are not listed, and for rows without a value


def is_census(found: Any) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("pooled"), Mapping)


def noise_of(found: Mapping[str, Any]) -> float | None:
    """The epsilon that every site spent on its answer; None: counts as they are."""
    asked = found.get("asked")
    epsilon = asked.get("epsilon") if isinstance(asked, Mapping) else None
    return None if epsilon is None else float(epsilon)


def statistics_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """As a table.json has them; `ValueError` where the census counted no column."""
    pooled, columns = found["pooled"], {}
    for name, table in pooled["tables"].items():
        if name.startswith(NUMBERS):
            own = name.removeprefix(NUMBERS)
            columns[own] = _numeric(own, table, pooled["moments"].get(name), pooled["quantiles"].get(name))
        elif name.startswith(WORDS):
            own = name.removeprefix(WORDS)
            columns[own] = {"levels": _levels(own, table)}
    if not columns:
        raise ValueError("the census counted no column: name some with --column")
    return {"columns": columns}


def _numeric(name: str, table: Any, moments: Any, quantiles: Any) -> dict[str, Any]:
    if table is None or quantiles is None:
        raise ValueError(f"no site shows its counts of the column {name!r}")
    rows, edges = np.asarray(table["rows"], dtype=float), np.asarray(table["edges"], dtype=float)
    if moments is not None:
        mean, variance = float(moments["mean"]), float(moments["variance"])
    else:
        rows = np.maximum(rows, 0)  # noise may go below
        middle = (edges[1:] + edges[:-1]) / 2
        mean = float((rows * middle).sum() / rows.sum())
        variance = float((rows * (middle - mean) ** 2).sum() / rows.sum())
    none = table["none"]
    return {
        "median": float(quantiles["0.5"]["value"]),
        "mean": mean,
        "scale": variance**0.5 or 1.0,
        "indicator": bool(none and none["rows"] > 0),
    }


def _levels(name: str, table: Any) -> list[str]:
    counts: Mapping[str, float] = {} if table is None else table["rows"]
    found = [word for word, count in counts.items() if count > 0 and word not in APART]
    if not found:
        raise ValueError(f"no site shows a word of the column {name!r}")
    return in_order(found)


def in_order(levels: Sequence[str]) -> list[str]:
    """By size where all are whole numbers, else by the alphabet."""
    whole = all(re.fullmatch(r"-?\d+", level) for level in levels)
    return sorted(levels, key=int) if whole else sorted(levels)
