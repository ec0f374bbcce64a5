"""The fairness section of a report, from fairness.json."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.census.fairness_groups import CLASS, METRICS, has_one_class, interval
from fedfrozen_app.core.quantiles import HEAD as QUANTILES
from fedfrozen_app.core.quantiles import cells
from fedfrozen_app.files.readers import Damaged, read_object

TITLES = {
    "global": "global model",
    "personal": "own models",
    "after": "own models after one more local round",
}
COLOURS = {"global": "blue", "personal": "vermillion", "after": "green"}
HEAD = ["group", "model", "rows", "accuracy", "95 % interval", "macro F1", "AUROC", "calibration error"]
# Within one class the other metrics are undefined.
CLASS_HEAD = ["class", "model", "rows", "recall", "95 % interval"]
MOST_LINES = 120


def read_fairness(run: Path) -> dict[str, Any] | None:
    """fairness.json as the run wrote it; None if it wrote none. Raises `Damaged`."""
    path = run / "fairness.json"
    found = read_object(path)
    if found is not None and not _is_fairness(found):
        raise Damaged(path, "it is not what a run writes")
    return found


def _is_fairness(found: Mapping[str, Any]) -> bool:
    models = found.get("models")
    return (
        "floor" in found
        and isinstance(models, dict)
        and all(
            isinstance(own, dict) and {"all", "groups", "gaps", "reliability"} <= own.keys()
            for own in models.values()
        )
    )


def fairness_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """For fairness.html: the worst and the best group of each column by model, and every group."""
    if not found or not found["models"]:
        return None
    gaps = [
        [
            column,
            TITLES.get(model, model),
            f"{gap['worst']} ({gap['worst_accuracy']:.3f})",
            f"{gap['best']} ({gap['best_accuracy']:.3f})",
            f"{gap['gap']:.3f}",
            f"{gap['low']:.3f} to {gap['high']:.3f}",
        ]
        for column in columns(found)
        for model, own in found["models"].items()
        if (gap := own["gaps"].get(column)) is not None
    ]
    groups = []
    for column in ("all", *columns(found)):
        if body := group_rows(found, column):
            label = "All rows" if column == "all" else f"By {column} ({len({line[0] for line in body})})"
            groups.append((label, head_of(column), body[:MOST_LINES]))
    return {"floor": found["floor"], "gaps": gaps, "groups": [*groups, *_bands(found)]}


def _bands(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Very many clients, as quantiles over them."""
    tables = []
    for model, own in found["models"].items():
        if (bands := own.get("client_bands")) is None:
            continue
        body = [["accuracy", *cells(bands["accuracy"], 3)], ["test rows", *cells(bands["test_rows"], 0)]]
        label = f"Over {bands['clients']:,} clients with test rows: {TITLES.get(model, model)}"
        tables.append((label, ["", *QUANTILES], body))
    return tables


def head_of(column: str) -> list[str]:
    return CLASS_HEAD if column == CLASS else HEAD


def columns(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(column for own in found["models"].values() for column in own["groups"]))


def group_rows(found: Mapping[str, Any], column: str) -> list[list[str]]:
    """Worst first, by the first model that has the group."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for model, own in found["models"].items():
        for value, one in ({"all": own["all"]} if column == "all" else own["groups"].get(column, {})).items():
            if "accuracy" in one:
                groups.setdefault(value, []).append((model, one))
    ordered = sorted(groups.items(), key=lambda item: item[1][0][1]["accuracy"])
    return [
        [value, TITLES.get(model, model), f"{one['rows']:,.0f}", f"{one['accuracy']:.3f}", _interval(one)]
        + ([] if column == CLASS else _others(one))
        for value, models in ordered
        for model, one in models
    ]


def _others(one: Mapping[str, Any]) -> list[str]:
    """The metrics other than accuracy."""
    if has_one_class(dict(one)):
        return ["one class only", *([""] * (len(METRICS) - 2))]
    return [f"{one[key]:.3f}" if key in one else "" for key in METRICS[1:]]


def _interval(one: Mapping[str, Any]) -> str:
    low, high = one["intervals"]["accuracy"] if "intervals" in one else interval(dict(one))
    return f"{low:.3f} to {high:.3f}"


def _sure(parts: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Only bins with finite scores: a diverged model has no confidence."""
    known = [part for part in parts if math.isfinite(part["confidence"])]
    return [[round(part["confidence"], 4), round(part["right"], 4)] for part in known]


def reliability_chart(found: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Accuracy by confidence: on the diagonal the model is calibrated."""
    if not found:
        return []
    series = [
        {
            "name": TITLES.get(model, model),
            "colour": COLOURS.get(model, "purple"),
            "stroke": "",
            "points": points,
        }
        for model, own in found["models"].items()
        if (points := _sure(own["reliability"]))
    ]
    if not series:
        return []
    even = {"name": "calibrated", "colour": "grey", "stroke": "dashed", "points": [[0, 0], [1, 1]]}
    axis = {"label": "confidence", "unit": "", "from": 0, "to": 1, "whole": False, "marks": []}
    return [
        {
            "title": "Reliability",
            "unit": "share that is right",
            "kind": "path",
            "x": axis,
            "from_zero": True,
            "least": 0.0,
            "series": [*series, even],
            "steps": True,
            "note": "",
        }
    ]
