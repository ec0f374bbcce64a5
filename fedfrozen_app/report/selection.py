"""The layers that clients chose in each round: a heat map, and how much the choices change."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfrozen_app.files.disk import whole_file

if TYPE_CHECKING:
    import numpy as np  # only for pictures; `fedfrozen list` imports this module

Row = dict[str, Any]
MAX_CLIENTS = 12  # more are shown only as their sum


def chose(rows: Sequence[Row]) -> bool:
    """Whether any client chose a layer; impossible if only the head is trained."""
    return any(layers for row in rows for layers in row.get("selection", {}).values())


def layer_count(rows: Sequence[Row]) -> int:
    """The number of layers to choose from; for older runs, the number chosen or scored."""
    known = (max(row.get("layers") or [-1]) for row in rows)
    chosen = (layer for row in rows for picked in row.get("selection", {}).values() for layer in picked)
    scored = (len(row.get("layer_scores", ())) - 1 for row in rows)
    return 1 + max([0, *known, *chosen, *scored])


def selection_changes(rows: Sequence[Row]) -> float | None:
    """The mean number of a client's layers that it did not choose in its previous round, over clients and
    rounds.

    0: all clients keep their layers; K: all clients change all K layers. None if nothing can be compared.
    """
    last: dict[str, set[int]] = {}
    changed: list[int] = []
    for row in rows:
        for client, layers in row.get("selection", {}).items():
            if client in last:
                changed.append(len(set(layers) - last[client]))
            last[client] = set(layers)
    return sum(changed) / len(changed) if changed else None


def selection_table(rows: Sequence[Row], clients: Sequence[str]) -> "np.ndarray":
    """(clients, layers, rounds): 1 if the client chose the layer, NaN if it was not in the round."""
    import numpy as np

    table = np.full((len(clients), layer_count(rows), len(rows)), np.nan)
    for column, row in enumerate(row["selection"] for row in rows):
        for number, client in enumerate(clients):
            if client in row:
                table[number, :, column] = 0
                table[number, row[client], column] = 1
    return table


def write_selection(rows: Sequence[Row], path: Path) -> None:
    """A PNG with the share of clients that chose each layer, and below it each client on its own."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazy: slow to import, and needed at the end
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in rows if row.get("selection")]
    clients = sorted({client for row in rows for client in row["selection"]}, key=lambda c: (len(c), c))
    table = selection_table(rows, clients)
    panels: list[tuple[str, np.ndarray]] = [("all clients", np.nanmean(table, axis=0))]
    if len(clients) <= MAX_CLIENTS:
        panels += [(f"client {client}", picked) for client, picked in zip(clients, table, strict=True)]
    _, layers, rounds = table.shape
    height = 0.35 + 0.11 * layers
    figure = Figure(figsize=(min(12, 3 + 0.12 * rounds), 0.8 + height * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, image) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, place + 1)
        extent = (rows[0]["round"] - 0.5, rows[-1]["round"] + 0.5, -0.5, layers - 0.5)
        axes.set_facecolor("0.85")  # visible where there is no value
        axes.imshow(image, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower", extent=extent)
        axes.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=8)
        axes.set_yticks([0, layers - 1] if layers > 1 else [0])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7, labelbottom=place == len(panels) - 1)
    axes.set_xlabel("round", fontsize=8)
    figure.suptitle("Layers that clients chose (grey: not in the round)", fontsize=9)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=120)
