"""Charts of single clients: how evenly they are served, and which layers they chose."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles

from fedfrozen_app.files.rows import HEADLINES, Row, number
from fedfrozen_app.report.chart_data import LEAST_SPAN, Chart, chart, curve, rounded
from fedfrozen_app.report.curves import Series
from fedfrozen_app.report.selection import layer_count

# Per-client metrics of the rows, in the order of the menu.
CLIENT_VIEWS = {
    "client_val_after": "after local training, own held-out rows",
    "client_val_before": "before local training, own held-out rows",
    **{f"personal_{name}": "own model, own test rows" for name in HEADLINES},
    **{f"test_{name}": "own model, test set" for name in HEADLINES},
}
MOST_CLIENTS = 200  # lines of a map: more would be too thin
MOST_VIEWS = 60  # clients with a view of their own layers


def client_keys(rows: Sequence[Row]) -> list[str]:
    """The accuracies that the rows have for each client."""
    return [key for key in CLIENT_VIEWS if any(key in (row.get("by_client") or {}) for row in rows)]


def client_values(rows: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """client: round: value, the clients in their natural order."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for client, value in ((row.get("by_client") or {}).get(key) or {}).items():
            found.setdefault(client, {})[row["round"]] = number(value)
    return {client: found[client] for client in in_order(found)}


def in_order(names: Iterable[str]) -> list[str]:
    """Partition numbers by value, site names alphabetically."""
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


def client_spread(rows: Sequence[Row], x: Chart) -> Chart:
    """Median, 10th to 90th percentile, minimum and maximum over a round's clients."""
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


def client_map(rows: Sequence[Row], x: Chart) -> Chart:
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


def selection_map(rows: Sequence[Row], x: Chart) -> Chart:
    """A map of the layers that clients chose: `selection` of a row is {client: [layers]}."""
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
    note = "Blank: no client chose layers in that round."
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
    """A line of values for each label; None where `value_of(label, round)` is not finite."""
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
