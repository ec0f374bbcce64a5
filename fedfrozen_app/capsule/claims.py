"""A capsule's claims: each cell's result, each group's mean, interval and verdict, all from raw rows."""

import math
from collections.abc import Sequence
from typing import Any

from scipy import stats

from fedfrozen_app.files.rows import Row
from fedfrozen_app.report.compare.model import Comparison, Group, bounds
from fedfrozen_app.report.compare.statistics import CONFIDENCE

TIMES = ("seconds", "client_seconds")
CLOSE = 1e-12  # tolerance between two results of the same arithmetic, read back from JSON


def claims_of(comparison: Comparison, test_rows: dict[str, int]) -> dict[str, Any]:
    """The claims of a comparison. `test_rows`: the number for each cell, by the name of its folder."""
    return {
        "metric": comparison.metric,
        "groups": [_group(group, comparison, test_rows) for group in comparison.groups],
    }


def _group(group: Group, comparison: Comparison, test_rows: dict[str, int]) -> dict[str, Any]:
    spread = group.spreads["final"]
    cells = {run.folder.name: run.metrics["final"] for run in group.runs}
    rows = min((test_rows.get(name, 0) for name in cells), default=0)
    found: dict[str, Any] = {
        "label": group.label,
        "cells": cells,
        "mean": spread.mean,
        "std": spread.std,
        "mean_low": spread.low,
        "mean_high": spread.high,
        "again": again(list(cells.values()), bounds("final", comparison.metric), rows),
    }
    if group.test is not None:
        found |= {"baseline": group.test.baseline, "difference": group.test.difference}
        found["verdict"] = group.test.verdict
    return found


def again(values: Sequence[float], within: tuple[float, float], rows: int) -> dict[str, Any] | None:
    """The 95 % interval for the result of a rerun cell; None if it cannot be estimated."""
    if len(values) > 1:
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        half = (
            float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * std * math.sqrt(1 + 1 / len(values))
        )
        low, high, why = max(within[0], mean - half), min(within[1], mean + half), "one more seed (Student)"
    elif within == (0.0, 1.0) and rows:
        found = stats.binomtest(round(values[0] * rows), rows).proportion_ci(CONFIDENCE, method="wilson")
        low, high, why = float(found.low), float(found.high), f"{rows} test rows (Wilson)"
    else:
        return None
    return {"low": low, "high": high, "by": why}


def without_times(rows: Sequence[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def wrong_claims(stated: Any, found: dict[str, Any]) -> list[str]:
    """The stated values that do not follow from the raw rows."""
    return [
        f"the table's {place} is stated as {one!r}, and its raw rows give {other!r}"
        for place, one, other in _differences(stated, found, "")
    ][:5]


def _differences(one: Any, other: Any, place: str) -> list[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list(dict.fromkeys([*one, *other]))
        return [
            each
            for key in keys
            for each in _differences(one.get(key), other.get(key), f"{place}.{key}".lstrip("."))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for n, (a, b) in pairs for each in _differences(a, b, f"{place}[{n}]")]
    numbers = all(isinstance(each, (int, float)) for each in (one, other))
    same = math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE) if numbers else one == other
    return [] if same else [(place, one, other)]
