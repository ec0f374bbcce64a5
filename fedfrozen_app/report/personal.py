"""Personal models judged fairly: every client on test rows of its own, and how evenly they fare.

`personal.json` of a run holds a line for each client: the global model, its personal model, and the same
after one more round of local training. The mean hides who is left behind, so the worst client and the spread
stand beside it. `fedfrozen personal RUN...` puts runs next to each other: for example a federation and
`strategy=local`, which is local training alone.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedfrozen_app.errors import UserError
from fedfrozen_app.files.disk import replace_file, whole_file
from fedfrozen_app.report.curves import BLUE, GREEN, ORANGE, VERMILLION

MODELS = ("global", "personal", "after")
WIDER = ("base", "novel")  # the personal model on all test rows, and on classes that nobody trained on
WORDS = {
    "global": "global",
    "personal": "personal",
    "after": "after one more local round",
    "base": "personal, on everybody's rows",
    "novel": "personal, on novel classes",
}
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#000000")


def summarise_clients(
    judged: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """`judged` are the clients' own figures, `rows` the run's rounds, `names` the partition's words."""
    took_part = Counter(client for row in rows for client in row.get("clients", ()))
    clients: list[dict[str, Any]] = [
        {
            "client": client,
            "name": names[int(client)] if client.isdecimal() and int(client) < len(names) else client,
            "rounds": took_part[client],
            **{key: int(figures[key]) for key in ("train_rows", "test_rows")},
            **{model: figures[model] for model in (*MODELS, *WIDER) if model in figures},
        }
        for client, figures in judged.items()
    ]
    found: dict[str, Any] = {
        model: spread([c[model] for c in clients if model in c]) for model in (*MODELS, *WIDER)
    }
    found = {model: figures for model, figures in found.items() if figures}
    levels = sorted({client["rounds"] for client in clients})
    by_participation = [
        {
            "rounds": level,
            "clients": sum(c["rounds"] == level for c in clients),
            **{
                model: statistics.fmean(values)
                for model in found
                if (values := [c[model] for c in clients if c["rounds"] == level and model in c])
            },
        }
        for level in levels
    ]
    return {**found, "by_participation": by_participation, "clients": clients}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Unweighted over clients: each counts once, however many rows it has."""
    if not values:
        return None
    return {"mean": statistics.fmean(values), "worst": min(values), "std": statistics.pstdev(values)}


def write_personal(figures: dict[str, Any], folder: Path) -> None:
    replace_file(folder / "personal.json", json.dumps(figures, indent=2) + "\n")
    lines = {WORDS[model]: accuracies(figures, model) for model in MODELS if model in figures}
    if lines:
        fairness_picture(lines, folder / "fairness.png")


def accuracies(figures: Mapping[str, Any], model: str) -> list[float]:
    return sorted(client[model] for client in figures["clients"] if model in client)


def fairness_picture(lines: Mapping[str, Sequence[float]], path: Path) -> None:
    """Clients from worst to best: the higher a line starts, the less anybody is left behind."""
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, values) in enumerate(lines.items()):
        places = [(place + 0.5) / len(values) for place in range(len(values))]
        colour = COLOURS[number % len(COLOURS)]
        mean = statistics.fmean(values)
        axes.plot(places, values, "o-", ms=4, lw=1.4, color=colour, label=f"{label} (mean {mean:.3f})")
    axes.set_xlim(0, 1)
    axes.set_xlabel("clients, from worst to best (share)")
    axes.set_ylabel("accuracy on the client's own test rows")
    axes.set_title("Who is left behind", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, fontsize=9)
    with whole_file(path) as part:
        figure.savefig(part, format="png")


def compare(arguments: list[str]) -> None:
    """`fedfrozen personal RUN... [png=FILE]`: the runs' clients side by side."""
    named = [word.removeprefix("png=") for word in arguments if word.startswith("png=")]
    runs = [Path(word).expanduser() for word in arguments if not word.startswith("png=")]
    if not runs:
        raise UserError("Say which runs: fedfrozen personal RUN..., where RUN is the folder of its results.")
    table = Table("run", "model", "clients", "mean", "worst", "std")
    lines: dict[str, list[float]] = {}
    names = [run.resolve().name for run in runs]
    for run, name in zip(runs, names, strict=True):
        figures, label = read(run), name if names.count(name) == 1 else str(run)
        everybody = len(figures["clients"]) + len(figures.get("not_judged", ()))
        for model in (*MODELS, *WIDER):
            if model in figures:
                values = accuracies(figures, model)
                numbers = (f"{figures[model][key]:.4f}" for key in ("mean", "worst", "std"))
                count = str(everybody) if len(values) == everybody else f"{len(values)} of {everybody}"
                table.add_row(label, WORDS[model], count, *numbers)
                if model in MODELS:  # the picture is of clients' own rows
                    lines[f"{label}: {WORDS[model]}"] = values
    Console(width=110).print(table)
    picture = Path(named[-1]) if named else runs[0] / "fairness.png"
    fairness_picture(lines, picture)
    print(f"Wrote {picture}")


def read(run: Path) -> dict[str, Any]:
    path = run / "personal.json"
    if not run.is_dir():
        raise UserError(f"There is no run folder {run}: give the folder that holds summary.json.")
    if not path.is_file():
        raise UserError(f"{run} holds no personal.json: run it again with personal=true.")
    return json.loads(path.read_text())
