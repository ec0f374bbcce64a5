"""The charts of a run, in the order of its page."""

import math
from collections.abc import Iterable, Sequence

from fedfrozen_app.files.rows import Row, capitalised, metric_name, number
from fedfrozen_app.report.chart_data import LEAST_SPAN, Chart, chart, curve, round_axis, rounded
from fedfrozen_app.report.client_charts import client_keys, client_map, client_spread, selection_map
from fedfrozen_app.report.curves import Series, running_total, series
from fedfrozen_app.report.selection import chose

# In the order of a Transformer's computation; query and key, which freezing removes, in signal colours.
ROLE_COLOURS = {
    "embedding": "purple",
    "query": "vermillion",
    "key": "orange",
    "value": "blue",
    "output": "sky",
    "mlp": "green",
    "norm": "yellow",
    "head": "ink2",
    "prompt": "wine",
    "fusion": "olive",
}
PHASE_COLOURS = {
    "train": "blue",
    "aggregate": "orange",
    "evaluate": "green",
    "checkpoint": "purple",
}
SPARE_COLOURS = ("indigo", "wine", "olive", "sky", "yellow", "vermillion")
Line = tuple[str, Series, str, str]  # name, values, colour, stroke


def make_charts(rows: Sequence[Row], own: Iterable[tuple[str, str, str]] = ()) -> list[Chart]:
    """The charts that the script draws; `own` are the strategy's own curves: key of the row, title, label."""
    x = round_axis(rows)
    charts = [
        _quality(rows, x),
        _loss(rows, x),
        _stacked(rows, x, "Sent up by role", "MB", "bytes_up_by_role", "bytes_up", 1e-6),
        _stacked(rows, x, "Sent down by role", "MB", "bytes_down_by_role", "bytes_down", 1e-6),
        _sent(rows, x),
        _drift(rows, x),
        _stacked(rows, x, "Time by phase", "s", "seconds", "seconds.total", 1.0),
    ]
    for key, title, label in own:
        if any(key.partition(".")[0] in row for row in rows):
            charts.append(_lines(title, x, _line(rows, label, key, "vermillion"), from_zero=True))
    if any("epsilon_max" in row for row in rows):
        epsilon = _line(rows, "largest epsilon of a client", "epsilon_max", "purple")
        charts.append(_lines(f"Privacy spent{per_unit(rows)}", x, epsilon, from_zero=True))
    if any(row.get("virtual_seconds") for row in rows):
        charts.insert(1, _over_time(rows))
    if client_keys(rows):
        charts += [client_spread(rows, x), client_map(rows, x)]
    if chose(rows):
        charts.append(selection_map(rows, x))
    return charts


def per_unit(rows: Sequence[Row]) -> str:
    """The unit of privacy of an epsilon: " per patient"."""
    return next((f" per {row['privacy_unit']}" for row in rows if "privacy_unit" in row), "")


def _line(rows: Sequence[Row], name: str, key: str, colour: str, stroke: str = "") -> Line:
    return name, series(rows, key), colour, stroke


def _lines(
    title: str, x: Chart, *lines: Line, unit: str = "", from_zero: bool = False, least: float = 0.0
) -> Chart:
    return chart(title, unit, "line", [curve(*line) for line in lines], x, from_zero=from_zero, least=least)


def _quality(rows: Sequence[Row], x: Chart) -> Chart:
    metric = metric_name(rows)
    return _lines(
        capitalised(metric),
        x,
        _line(rows, "test", f"test_{metric}", "blue"),
        _line(rows, "central validation", f"val_{metric}", "vermillion", "dashed"),
        _line(rows, "clients before local training", "client_val_before", "purple", "dashed"),
        _line(rows, "clients after local training", "client_val_after", "green"),
        least=LEAST_SPAN,
    )


def _over_time(rows: Sequence[Row]) -> Chart:
    """The metric against the virtual time at which its round ended."""
    metric = metric_name(rows)
    key = f"test_{metric}"
    points = [
        (rounded(row["virtual_seconds"]), rounded(number(row[key])), f"round {row['round']}")
        for row in rows
        if key in row and "virtual_seconds" in row and not math.isnan(number(row[key]))
    ]
    last = max((point[0] for point in points), default=0.0)
    x = {
        "label": "virtual time",
        "unit": "s",
        "from": 0.0,
        "to": last * 1.02 or 1.0,
        "whole": False,
        "marks": [],
    }
    line = {"name": "test", "colour": "blue", "stroke": "", "points": points}
    title = f"{capitalised(metric)} over virtual time"
    return chart(title, "", "path", [line], x, from_zero=False, least=LEAST_SPAN)


def _loss(rows: Sequence[Row], x: Chart) -> Chart:
    return _lines(
        "Loss",
        x,
        _line(rows, "train", "train_loss", "vermillion"),
        _line(rows, "test", "test_loss", "blue"),
        _line(rows, "central validation", "val_loss", "green", "dashed"),
    )


def _sent(rows: Sequence[Row], x: Chart) -> Chart:
    up, down = (running_total(series(rows, f"bytes_{way}"), 1e-6) for way in ("up", "down"))
    lines = ("up", up, "blue", ""), ("down", down, "orange", "dashed")
    return _lines("Sent so far", x, *lines, unit="MB", from_zero=True)


def _drift(rows: Sequence[Row], x: Chart) -> Chart:
    return _lines(
        "Client drift",
        x,
        _line(rows, "kernel rms", "drift.kernel.rms", "vermillion"),
        _line(rows, "kernel mean update (norm)", "drift.kernel.mean_update", "vermillion", "dashed"),
        _line(rows, "rest rms", "drift.rest.rms", "blue"),
        _line(rows, "rest mean update (norm)", "drift.rest.mean_update", "blue", "dashed"),
        from_zero=True,
    )


def _stacked(
    rows: Sequence[Row], x: Chart, title: str, unit: str, key: str, total: str, scale: float
) -> Chart:
    """Stacked bars of the parts under `key`; the rest of `total` gets a grey bar."""
    known = PHASE_COLOURS if key == "seconds" else ROLE_COLOURS
    found = {part for row in rows for part in (row.get(key) or {})} - {"total"}
    parts = [part for part in known if part in found] + sorted(found - known.keys())
    made = []
    for index, part in enumerate(parts):
        colour = known.get(part) or SPARE_COLOURS[index % len(SPARE_COLOURS)]
        made.append(curve(part, _scaled(_part(rows, key, part), scale), colour))
    rest = _rest(rows, key, total, parts)
    if any(value > 0 for value in rest.values):
        name = "other" if key == "seconds" else ("plan and digests" if parts else "all roles")
        made.append(curve(name, _scaled(rest, scale), "grey"))
    bars = chart(title, unit, "bars", made, x, from_zero=True)
    if not parts:
        bars["note"] = f"Not measured: {title.lower()}. {bars['note']}".strip()
    return bars


def _part(rows: Sequence[Row], key: str, part: str) -> Series:
    # Not series(): a site's name for a role may contain a dot.
    having = [row for row in rows if part in (row.get(key) or {})]
    return Series([row["round"] for row in having], [number(row[key][part]) for row in having])


def _rest(rows: Sequence[Row], key: str, total: str, parts: Sequence[str]) -> Series:
    whole = series(rows, total)
    by_round = {row["round"]: row.get(key) or {} for row in rows}
    left = [
        value - sum(number(by_round[place].get(part, 0)) for part in parts)
        for place, value in zip(whole.rounds, whole.values, strict=True)
    ]
    # Phases and total are timed separately, so the rest may be slightly negative.
    return Series(whole.rounds, [value if math.isnan(value) else max(value, 0.0) for value in left])


def _scaled(data: Series, scale: float) -> Series:
    return Series(data.rounds, [value * scale for value in data.values])
