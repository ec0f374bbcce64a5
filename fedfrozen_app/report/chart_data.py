"""The parts of a chart, as data for the page's script (assets/page.js describes the format)."""

import math
from collections.abc import Sequence
from typing import Any

from fedfrozen_app.files.rows import Row
from fedfrozen_app.report.curves import Series, stage_marks

Chart = dict[str, Any]
Mark = tuple[float, str]
LEAST_SPAN = 0.05  # of an accuracy axis


def round_axis(rows: Sequence[Row]) -> Chart:
    """The round axis shared by all charts of a run, with room for bars and marks at stage changes."""
    rounds = [row["round"] for row in rows] or [0]
    marks: list[Mark] = stage_marks(rows)
    return {
        "label": "round",
        "unit": "",
        "from": min(rounds) - 0.6,
        "to": max(rounds) + 0.6,
        "whole": True,
        "marks": marks,
    }


def chart(
    title: str, unit: str, kind: str, made: list[Chart], x: Chart, *, from_zero: bool, least: float = 0.0
) -> Chart:
    """Only series with something to draw are kept; the note names what is missing.

    `least`: the least range of the value axis of a share.
    """
    drawn = [one for one in made if any(point[1] is not None for point in one["points"])]
    absent = [one["name"] for one in made if not one["points"]]
    notes = [f"Not measured: {', '.join(absent)}."] if absent else []
    broken = []
    for one in made:
        bad = [str(point[0]) for point in one["points"] if point[1] is None]
        if bad:
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            broken.append(f"{one['name']} in round {', '.join(bad[:8])}{more}")
    if broken:
        notes.append(f"Not a finite number: {'; '.join(broken)}.")
    return {
        "title": title,
        "unit": unit,
        "kind": kind,
        "x": x,
        "from_zero": from_zero,
        "least": least,
        "series": drawn,
        "note": " ".join(notes),
    }


def curve(name: str, data: Series, colour: str, stroke: str = "") -> Chart:
    """`stroke` is "" for a full line, "dashed" or "dotted"."""
    values = (None if math.isnan(value) else rounded(value) for value in data.values)
    points = list(zip(data.rounds, values, strict=True))
    return {"name": name, "colour": colour, "stroke": stroke, "points": points}


def rounded(value: float) -> float:
    """Round to six digits: less than a pixel, and a smaller file."""
    return float(f"{value:.6g}")
