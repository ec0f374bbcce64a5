"""The charts of a run, as data for the page's script (page.js says in which form)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

from fedfrozen_app.files.rows import Row, metric_name, number
from fedfrozen_app.report.curves import Series, running_total, series, stage_marks
from fedfrozen_app.report.selection import chose, layer_count

Chart = dict[str, Any]
Mark = tuple[float, str]

# In the order in which a Transformer uses them; query and key, which freezing removes, stand out.
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
# What rows keep client by client, in the order in which it is offered.
CLIENT_VIEWS = {
    "client_val_after": "after local training, own held-out rows",
    "client_val_before": "before local training, own held-out rows",
    "personal_accuracy": "own model, own test rows",
    "personal_f1": "own model, own test rows",
    "test_accuracy": "own model, test set",
    "test_f1": "own model, test set",
}
LEAST_SPAN = 0.05  # of an axis of accuracies
MOST_CLIENTS = 200  # lines of a map: more would be thinner than a hair
MOST_VIEWS = 60  # clients whose layers can be looked at one by one


def make_charts(rows: Sequence[Row], own: Iterable[tuple[str, str, str]] = ()) -> list[Chart]:
    """What the script draws, in the order of the page; `own` are the strategy's: figure, title, label."""
    metric = metric_name(rows)
    x = round_axis(rows)

    def lines(
        title: str, unit: str, *specs: tuple[str, Series, str, str], zero: bool, least: float = 0.0
    ) -> Chart:
        made = [curve(name, data, colour, stroke) for name, data, colour, stroke in specs]
        return chart(title, unit, "line", made, x, from_zero=zero, least=least)

    def of(name: str, key: str, colour: str, stroke: str = "") -> tuple[str, Series, str, str]:
        return name, series(rows, key), colour, stroke

    def sent(way: str, colour: str, stroke: str = "") -> tuple[str, Series, str, str]:
        return way, running_total(series(rows, f"bytes_{way}"), 1e-6), colour, stroke

    charts = [
        lines(
            metric.capitalize(),
            "",
            of("test", f"test_{metric}", "blue"),
            of("central validation", f"val_{metric}", "vermillion", "dashed"),
            of("clients before local training", "client_val_before", "purple", "dashed"),
            of("clients after local training", "client_val_after", "green"),
            zero=False,
            least=LEAST_SPAN,
        ),
        lines(
            "Loss",
            "",
            of("train", "train_loss", "vermillion"),
            of("test", "test_loss", "blue"),
            of("central validation", "val_loss", "green", "dashed"),
            zero=False,
        ),
        _stacked(rows, x, "Sent up by role", "MB", "bytes_up_by_role", "bytes_up", 1e-6),
        _stacked(rows, x, "Sent down by role", "MB", "bytes_down_by_role", "bytes_down", 1e-6),
        lines("Sent so far", "MB", sent("up", "blue"), sent("down", "orange", "dashed"), zero=True),
        lines(
            "Client drift",
            "",
            of("kernel rms", "drift.kernel.rms", "vermillion"),
            of("kernel mean update (norm)", "drift.kernel.mean_update", "vermillion", "dashed"),
            of("rest rms", "drift.rest.rms", "blue"),
            of("rest mean update (norm)", "drift.rest.mean_update", "blue", "dashed"),
            zero=True,
        ),
        _stacked(rows, x, "Time by phase", "s", "seconds", "seconds.total", 1.0),
    ]
    for key, title, label in own:
        if any(key.partition(".")[0] in row for row in rows):
            charts.append(lines(title, "", of(label, key, "vermillion"), zero=True))
    if any("epsilon_max" in row for row in rows):
        epsilon = of("largest epsilon of a client", "epsilon_max", "purple")
        charts.append(lines(f"Privacy spent{per_unit(rows)}", "", epsilon, zero=True))
    if client_keys(rows):
        charts += [_client_spread(rows, x), _client_map(rows, x)]
    if chose(rows):
        charts.append(_selection_map(rows, x))
    return charts


def round_axis(rows: Sequence[Row]) -> Chart:
    """One axis for all charts of a run, with room for bars and the changes of stage marked."""
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
    """Only series with something to draw are kept; the note says in words what is missing.

    `least`: what the value axis of a share spans at least.
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
    """Six digits are below a pixel, and keep the file small."""
    return float(f"{value:.6g}")


def per_unit(rows: Sequence[Row]) -> str:
    """Whom an epsilon protects: " per patient"."""
    return next((f" per {row['privacy_unit']}" for row in rows if "privacy_unit" in row), "")


def _stacked(
    rows: Sequence[Row], x: Chart, title: str, unit: str, key: str, total: str, scale: float
) -> Chart:
    """Bars of the parts under `key`; what the parts leave of `total` gets its own, grey one."""
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
    # Not series(): a site may name a role with a dot in it.
    having = [row for row in rows if part in (row.get(key) or {})]
    return Series([row["round"] for row in having], [number(row[key][part]) for row in having])


def _rest(rows: Sequence[Row], key: str, total: str, parts: Sequence[str]) -> Series:
    whole = series(rows, total)
    by_round = {row["round"]: row.get(key) or {} for row in rows}
    left = [
        value - sum(number(by_round[place].get(part, 0)) for part in parts)
        for place, value in zip(whole.rounds, whole.values, strict=True)
    ]
    # Phases are timed apart from the total, which may leave a rest of a hair below nothing.
    return Series(whole.rounds, [value if math.isnan(value) else max(value, 0.0) for value in left])


def _scaled(data: Series, scale: float) -> Series:
    return Series(data.rounds, [value * scale for value in data.values])


# Client by client ------------------------------------------------------------------------------------------


def client_keys(rows: Sequence[Row]) -> list[str]:
    """Which accuracies the rows keep client by client."""
    return [key for key in CLIENT_VIEWS if any(key in (row.get("by_client") or {}) for row in rows)]


def client_values(rows: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """client: round: value, the clients in their natural order."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for client, value in ((row.get("by_client") or {}).get(key) or {}).items():
            found.setdefault(client, {})[row["round"]] = number(value)
    return {client: found[client] for client in in_order(found)}


def in_order(names: Iterable[str]) -> list[str]:
    """Partition numbers by their value, site names by the alphabet."""
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


def _client_spread(rows: Sequence[Row], x: Chart) -> Chart:
    """The middle, the tenth to the ninetieth percentile, and the two ends over a round's clients."""
    keys = client_keys(rows)
    key = next((key for key in keys if key.startswith("test_")), keys[0])
    by_round = {}
    for row in rows:
        values = map(number, ((row.get("by_client") or {}).get(key) or {}).values())
        if finite := [value for value in values if not math.isnan(value)]:
            by_round[row["round"]] = finite

    def one(name: str, pick: Callable[[list[float]], float], colour: str, stroke: str = "") -> Chart:
        return curve(name, Series(list(by_round), [pick(v) for v in by_round.values()]), colour, stroke)

    middle = one("median", median, "blue")
    many = {place: values for place, values in by_round.items() if len(values) > 1}
    deciles = {place: quantiles(values, n=10, method="inclusive") for place, values in many.items()}
    middle["band"] = [[place, rounded(cut[0]), rounded(cut[-1])] for place, cut in deciles.items()]
    made = [one("best", max, "green", "dotted"), middle, one("worst", min, "vermillion", "dashed")]
    spread = chart("Spread over the clients", "", "line", made, x, from_zero=False, least=LEAST_SPAN)
    spread["note"] = f"Of each round's clients: {CLIENT_VIEWS[key]}. The band holds the middle 80 %."
    return spread


def _client_map(rows: Sequence[Row], x: Chart) -> Chart:
    views, notes = [], ["Blank: the client took no part in the round."]
    for key in client_keys(rows):
        values = client_values(rows, key)
        shown = list(values)
        if len(values) > MOST_CLIENTS:
            latest = {client: last(by_round) for client, by_round in values.items()}
            shown = in_order(sorted(latest, key=latest.__getitem__)[:MOST_CLIENTS])
            notes = [f"The {MOST_CLIENTS} of {len(values)} clients with the lowest last value.", notes[-1]]
        views.append(_view(CLIENT_VIEWS[key], "", shown, _rounds(rows), partial(_at, values)))
    return _map("Accuracy of each client", views, rows, x, " ".join(notes))


def last(by_round: Mapping[int, float]) -> float:
    return list(by_round.values())[-1]


def _at(values: Mapping[str, Mapping[int, float]], client: str, place: int) -> float | None:
    return values[client].get(place)


# Layers ----------------------------------------------------------------------------------------------------


def _selection_map(rows: Sequence[Row], x: Chart) -> Chart:
    """Which layers the clients chose: `selection` of a row is {client: [layers]}."""
    chosen: dict[int, dict[str, set[str]]] = {
        row["round"]: {client: set(map(str, layers)) for client, layers in row["selection"].items()}
        for row in rows
        if row.get("selection")
    }
    layers = [str(layer) for layer in range(layer_count(rows))]
    clients = in_order({client for part in chosen.values() for client in part})
    rounds = _rounds(rows)

    def share(layer: str, place: int) -> float | None:
        part = chosen.get(place)
        return None if not part else sum(layer in picked for picked in part.values()) / len(part)

    def count(client: str, place: int) -> float | None:
        picked = chosen.get(place, {}).get(client)
        return None if picked is None else len(picked)

    def has(client: str, layer: str, place: int) -> float | None:
        picked = chosen.get(place, {}).get(client)
        return None if picked is None else float(layer in picked)

    shown = clients[:MOST_CLIENTS]
    views = [
        _view("each layer: share of the clients that chose it", "", layers, rounds, share, 0, 1),
        _view("each client: number of layers chosen", "layers", shown, rounds, count, 0, len(layers)),
    ]
    for client in clients[:MOST_VIEWS]:
        views.append(_view(f"client {client}: its layers", "", layers, rounds, partial(has, client), 0, 1))
    note = "Blank: nobody chose layers in that round."
    if len(clients) > MOST_VIEWS:
        note += f" The first {len(shown)} of {len(clients)} clients by name; metrics.jsonl has all."
    return _map("Selected layers", views, rows, x, note)


def _rounds(rows: Sequence[Row]) -> list[int]:
    return [row["round"] for row in rows if row["round"] > 0]


def _map(title: str, views: list[Chart], rows: Sequence[Row], x: Chart, note: str) -> Chart:
    return {
        "title": title,
        "unit": "",
        "kind": "map",
        "wide": True,
        "x": x,
        "rounds": _rounds(rows),
        "views": views,
        "note": note,
    }


def _view(
    name: str,
    unit: str,
    labels: Sequence[str],
    rounds: Sequence[int],
    value_of: Callable[[str, int], float | None],
    low: float | None = None,
    high: float | None = None,
) -> Chart:
    """A line of values for each label; None where `value_of(label, round)` has nothing finite to say."""
    values = [
        [None if value is None or math.isnan(value) else round(value, 4) for value in line]
        for line in ([value_of(label, place) for place in rounds] for label in labels)
    ]
    found = [value for line in values for value in line if value is not None] or [0.0]
    return {
        "name": name,
        "unit": unit,
        "labels": list(labels),
        "values": values,
        "low": min(found) if low is None else low,
        "high": max(found) if high is None else high,
    }
