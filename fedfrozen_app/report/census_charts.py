"""The drawings of a census page: a heat map of classes by site, and histograms of values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedfrozen_app.report.chart_data import Chart

NONE = "(none)"
COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "wine", "olive", "indigo", "yellow")
STROKES = ("", "dashed", "dotted")
TITLES = {
    "length": ("Characters of a text", "characters"),
    "tokens": ("Tokens of a text", "tokens"),
    "unknown": ("Unknown tokens of a text", "share"),
    "width": ("Width of the pictures", "pixels"),
    "height": ("Height of the pictures", "pixels"),
    "intensity": ("Intensity of the pixels", "level"),
    "brightness": ("Mean intensity of a picture", "level"),
}
MOST_CLASSES = 60
CELL, ROW, LEFT, TOP, RIGHT = 46, 34, 150, 96, 76  # of the heat map, in pixels
Tables = Mapping[str, Mapping[str, Any]]  # by site


def value_title(name: str) -> str:
    return TITLES.get(name, (name.partition("/")[2] or name, ""))[0].lower()


# Classes by site -------------------------------------------------------------------------------------------


def heat_map(census: Mapping[str, Any]) -> dict[str, Any] | None:
    """Cells and positions of the heat map; None if no site reports its classes."""
    tables = {site: found["tables"].get("classes") for site, found in census["sites"].items()}
    known = {site: table for site, table in tables.items() if table is not None}
    names = _class_names(known)
    if not known or not names:
        return None
    shown = names[:MOST_CLASSES]
    more = "" if len(names) <= MOST_CLASSES else f" The first {MOST_CLASSES} of {len(names)} classes."
    return {
        "more": more,
        "width": LEFT + CELL * len(shown) + RIGHT,
        "height": TOP + CELL * len(known) * 3 // 4 + 6,
        "left": LEFT - 8,
        "top": TOP - 8,
        "cell_width": CELL,
        "cell_height": ROW,
        "columns": [(_x(place) + CELL // 2, _short(name, 15), name) for place, name in enumerate(shown)],
        "lines": [_line(place, site, known[site], shown) for place, site in enumerate(known)],
    }


def _class_names(tables: Tables) -> list[str]:
    """Numbers by value, then words alphabetically; rows without a class last."""
    names = dict.fromkeys(name for table in tables.values() for name in (*table["rows"], *table["hidden"]))
    ordered = sorted(
        names,
        key=lambda name: (name == NONE, not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
    )
    return [name for name in ordered if name != NONE or any(_count(t, NONE) != 0 for t in tables.values())]


def _line(place: int, site: str, table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    y = TOP + ROW * place
    return {
        "y": y,
        "text_y": f"{y + ROW * 0.65:.0f}",
        "short": _short(site, 20),
        "cells": [_cell(table, site, name, _x(column)) for column, name in enumerate(names)],
    }


def _cell(table: Mapping[str, Any], site: str, name: str, x: int) -> dict[str, Any]:
    count = _count(table, name)
    share = math.sqrt(count / table["total"]) if count and table["total"] else 0.0
    rows = "too few to show" if count is None else f"{count:,g} rows"
    return {
        "x": x,
        "title": f"{site}, {name}: {rows}",
        "opacity": f"{0.06 + 0.84 * share if count else 0.03:.2f}",
        "strong": share > 0.6,
        "text": "?" if count is None else "·" if not count else _brief(count),
    }


def _count(table: Mapping[str, Any], name: str) -> float | None:
    """The count of a class; None if it is hidden."""
    if name in table["hidden"]:
        return None
    return table["rows"].get(name, None if table["others_hidden"] else 0)


def _x(column: int) -> int:
    return LEFT + CELL * column


def _brief(count: float) -> str:
    return f"{count:,g}" if count < 10_000 else f"{count / 1000:,.0f}k"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


# Histograms ------------------------------------------------------------------------------------------------


def histograms(census: Mapping[str, Any]) -> list[Chart]:
    sites = census["sites"]
    return [_histogram(name, sites) for name in census["pooled"]["tables"] if _is_spread(name, sites)]


def _is_spread(name: str, sites: Mapping[str, Any]) -> bool:
    """Whether this is an informative histogram: not all rows of all sites are in one interval."""
    tables = [table for found in sites.values() if (table := found["tables"].get(name)) is not None]
    if not tables or "edges" not in tables[0]:
        return False
    filled = {(low, high) for table in tables for low, high, count in _intervals(table) if count}
    return len(filled) > 1


def _intervals(table: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    edges = table["edges"]
    return list(zip(edges, edges[1:], table["rows"], strict=False))


def _histogram(name: str, sites: Mapping[str, Any]) -> Chart:
    """A step chart of each site's shares of rows by interval, drawn to the intervals' widths."""
    title, label = TITLES.get(name, (name.partition("/")[2], "value"))
    series, ends = [], []
    for number, (site, found) in enumerate(sites.items()):
        table = found["tables"].get(name)
        if table is None or not sum(table["rows"]):
            continue
        points = _steps(table)
        ends += [x for x, _ in points]
        turn, colour = divmod(number, len(COLOURS))
        style = {"name": site, "colour": COLOURS[colour], "stroke": STROKES[turn % len(STROKES)]}
        series.append({**style, "points": [[x, round(y, 4)] for x, y in points]})
    low, high = min(ends or [0]), max(ends or [1])
    return {
        "title": title,
        "unit": "share of the site's rows",
        "kind": "path",
        "x": {"label": label, "unit": "", "from": low, "to": high, "whole": False, "marks": []},
        "from_zero": True,
        "least": 0.0,
        "series": series,
        "steps": True,
        "note": "Where few people are, neighbouring intervals are joined."
        if series
        else "No site reported it.",
    }


def _steps(table: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Two points for each interval, up to the last one that has rows."""
    total, intervals = sum(table["rows"]), _intervals(table)
    last = max(place for place, (_, _, count) in enumerate(intervals) if count)
    points: list[tuple[float, float]] = []
    for place, (low, high, count) in enumerate(intervals[: last + 1]):
        if high > 1e5 and place:  # open to the right: drawn as wide as its lower end
            high = 2 * low
        points += [(low, count / total), (high, count / total)]
    return points
