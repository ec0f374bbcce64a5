"""Metrics by group: which groups are shown, which one is served worst, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfrozen_app.census.cells import by_name
from fedfrozen_app.census.fairness_scores import (
    Predictions,
    bootstrap,
    compute_metrics,
    newcombe,
    reliability,
    wilson,
)
from fedfrozen_app.census.floors import hidden_cells, joined_cells

CLASS, SITE = "class", "site"
METRICS = ("accuracy", "f1", "auroc", "ece")
Found = dict[str, Any]


def evaluate_groups(
    predictions: Predictions,
    columns: Mapping[str, Sequence[Any]],
    classes: Sequence[str],
    floor: int,
    times: int = 0,
) -> Found:
    """Metrics of all rows, by the values of each column, and by class; groups of few people are hidden, with
    others that would reveal them, as in a census. `times`: bootstrap replicates for intervals."""
    found: Found = {
        "all": _with_intervals(predictions, times),
        "reliability": released_reliability(predictions, floor),
    }
    found["groups"], found["hidden"] = {}, {}
    words: dict[str, list[str]] = {
        name: [_word(value) for value in values] for name, values in columns.items()
    }
    if not predictions.several:
        words = {CLASS: [classes[label] for label in predictions.labels.tolist()], **words}
    for name, values in words.items():
        table = by_name(name, predictions.people, values)
        cells = joined_cells(table, floor) if len(predictions) else None
        hidden = set(range(table.size)) if cells is None else hidden_cells(table, cells)
        rows = _rows_by_value(values, table.names)
        found["groups"][name] = {
            value: _with_intervals(predictions.take(rows[cell]), times)
            for cell, value in enumerate(table.names)
            if cell not in hidden
        }
        found["hidden"][name] = len(hidden)
    return found


def _rows_by_value(values: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
    """The rows of each name, found in one pass: there may be thousands of sites."""
    places = {name: place for place, name in enumerate(names)}
    cells = np.fromiter((places[value] for value in values), dtype=np.int64, count=len(values))
    ends = np.cumsum(np.bincount(cells, minlength=len(names)))
    return np.split(np.argsort(cells, kind="stable"), ends)[: len(names)]


def _word(value: Any) -> str:
    return str(value).strip() or "(none)"


def released_reliability(predictions: Predictions, floor: int) -> list[dict[str, float]]:
    """The bins with at least `floor` rows."""
    return [part for part in reliability(predictions) if part["rows"] >= floor] if len(predictions) else []


def _with_intervals(predictions: Predictions, times: int) -> Found:
    if not len(predictions):
        return {"rows": 0, "people": 0}
    found: Found = dict(compute_metrics(predictions))
    if times:
        found["intervals"] = {name: list(ends) for name, ends in bootstrap(predictions, times).items()}
    return found


# Over a wire that carries numbers by name -----------------------------------------------------------------

MARK = "fair"


def flat(model: str, found: Found) -> dict[str, float]:
    """Encode as metrics of a reply: fair/MODEL/COLUMN/VALUE/METRIC."""
    if not found:  # a model without classes
        return {}
    sent = {f"{MARK}/{model}/all//{key}": value for key, value in found["all"].items() if key != "intervals"}
    for column, groups in found["groups"].items():
        for value, own in groups.items():
            safe = value.replace("/", "∕")  # a slash separates the parts of a name
            sent |= {
                f"{MARK}/{model}/{column}/{safe}/{key}": number
                for key, number in own.items()
                if key != "intervals"
            }
    for number, part in enumerate(found["reliability"]):
        sent |= {f"{MARK}/{model}/reliability/{number}/{key}": value for key, value in part.items()}
    return {key: float(value) for key, value in sent.items()}


def unflat(sent: Mapping[str, float]) -> dict[str, Found]:
    """The inverse of `flat`, by model; other keys are ignored."""
    found: dict[str, Found] = {}
    bins: dict[str, dict[str, dict[str, float]]] = {}
    for name, number in sent.items():
        words = name.split("/")
        if len(words) != 5 or words[0] != MARK:
            continue
        _, model, column, value, key = words
        own = found.setdefault(model, {"all": {}, "groups": {}, "reliability": [], "hidden": {}})
        if column == "all":
            own["all"][key] = number
        elif column == "reliability":
            bins.setdefault(model, {}).setdefault(value, {})[key] = number
        else:
            own["groups"].setdefault(column, {}).setdefault(value, {})[key] = number
    for model, parts in bins.items():
        found[model]["reliability"] = [
            part for part in parts.values() if {"from", "rows", "confidence", "right"} <= part.keys()
        ]
    return found


# Together -------------------------------------------------------------------------------------------------


def together(by_site: Mapping[str, Found]) -> Found:
    """Combine several sites: rows are summed, metrics averaged by rows, and each site is a group too."""
    groups: dict[str, dict[str, list[Found]]] = {}
    for found in by_site.values():
        for column, own in found["groups"].items():
            for value, one in own.items():
                groups.setdefault(column, {}).setdefault(value, []).append(one)
    merged = {column: {value: mean(parts) for value, parts in own.items()} for column, own in groups.items()}
    bins: dict[float, list[Found]] = {}
    for found in by_site.values():
        for part in found["reliability"]:
            bins.setdefault(part["from"], []).append(part)
    return {
        "all": mean([found["all"] for found in by_site.values()]),
        "groups": {SITE: {site: found["all"] for site, found in by_site.items()}, **merged},
        "reliability": [mean(parts) | {"from": edge} for edge, parts in sorted(bins.items())],
        "hidden": {},
    }


def mean(parts: Sequence[Found]) -> Found:
    """Sum rows and people, and average everything else by rows."""
    rows = sum(part.get("rows", 0) for part in parts)
    found: Found = {"rows": rows, "people": sum(part.get("people", 0) for part in parts)}
    names = dict.fromkeys(
        name for part in parts for name in part if name not in ("rows", "people", "intervals")
    )
    for name in names:
        having = [part for part in parts if name in part and part.get("rows")]
        weight = sum(part["rows"] for part in having)
        if weight:
            found[name] = sum(part["rows"] * part[name] for part in having) / weight
    return found


def has_one_class(own: Found) -> bool:
    """Whether a group's rows are all of one class, so that always predicting it would be right."""
    return "accuracy" in own and "f1" not in own


def gaps(found: Found) -> dict[str, Found]:
    """By column: the worst and the best group in accuracy, and the gap between them with its interval.

    A group with one class is neither, unless the groups are the classes.
    """
    by_column = {}
    for column, groups in found["groups"].items():
        evaluated = {
            value: own
            for value, own in groups.items()
            if "accuracy" in own and own["rows"] and (column == CLASS or not has_one_class(own))
        }
        if len(evaluated) < 2:
            continue
        worst = min(evaluated, key=lambda value: (evaluated[value]["accuracy"], value))
        best = max(evaluated, key=lambda value: (evaluated[value]["accuracy"], value))
        ends = newcombe(
            *((evaluated[value]["accuracy"], counted(evaluated[value])) for value in (best, worst))
        )
        by_column[column] = {
            "worst": worst,
            "best": best,
            "worst_accuracy": evaluated[worst]["accuracy"],
            "best_accuracy": evaluated[best]["accuracy"],
            "gap": evaluated[best]["accuracy"] - evaluated[worst]["accuracy"],
            "low": ends[0],
            "high": ends[1],
        }
    return by_column


def counted(own: Found) -> float:
    """The number of independent rows for an interval: people, if a person may have several rows."""
    return min(own["rows"], own.get("people") or own["rows"])


def interval(own: Found) -> tuple[float, float]:
    """The confidence interval of the accuracy."""
    return wilson(own["accuracy"], counted(own))


def summary(models: Mapping[str, Found], floor: int) -> Found:
    """fairness.json."""
    return {
        "floor": floor,
        "models": {
            name: {**found, "gaps": gaps(found)} for name, found in models.items() if found["all"].get("rows")
        },
    }
