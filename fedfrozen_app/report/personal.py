"""Personal models, each evaluated on its client's own test rows, and how even the results are.

`personal.json` of a run holds one entry per client: the global model, its personal model, and the same
after one more round of local training. The mean hides clients that are served badly, so the worst client and
the spread are reported too. `fedfrozen personal RUN...` puts runs next to each other: for example a
federation and `strategy=local`, which is local training alone.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files.disk import replace_file, whole_file
from fedfrozen_app.files.kinds import check_is_run
from fedfrozen_app.files.readers import Damaged, read_object
from fedfrozen_app.report.curves import BLUE, GREEN, ORANGE, VERMILLION

MODELS = ("global", "personal", "after")
WIDER = ("base", "novel")  # the personal model on all test rows, and on classes that no client trained on
WORDS = {
    "global": "global",
    "personal": "personal",
    "after": "after one more local round",
    "base": "personal, on all clients' rows",
    "novel": "personal, on novel classes",
}
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#000000")


def summarise_clients(
    evaluated: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Summary of personal models. `evaluated`: the clients' metrics, `rows`: the run's rounds, `names`: the
    partition's names of clients."""
    took_part = Counter(client for row in rows for client in row.get("clients", ()))
    clients: list[dict[str, Any]] = [
        {
            "client": client,
            "name": names[int(client)] if client.isdecimal() and int(client) < len(names) else client,
            "rounds": took_part[client],
            **{key: int(metrics[key]) for key in ("train_rows", "test_rows")},
            **{model: metrics[model] for model in (*MODELS, *WIDER) if model in metrics},
        }
        for client, metrics in evaluated.items()
    ]
    found: dict[str, Any] = {
        model: spread([c[model] for c in clients if model in c]) for model in (*MODELS, *WIDER)
    }
    found = {model: metrics for model, metrics in found.items() if metrics}
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
    """The spread over clients, unweighted: each counts once, regardless of its rows."""
    if not values:
        return None
    return {"mean": statistics.fmean(values), "worst": min(values), "std": statistics.pstdev(values)}


def write_personal(metrics: dict[str, Any], folder: Path) -> None:
    replace_file(folder / "personal.json", json.dumps(metrics, indent=2) + "\n")
    lines = {WORDS[model]: accuracies(metrics, model) for model in MODELS if model in metrics}
    if lines:
        fairness_picture(lines, folder / "fairness.png")


def accuracies(metrics: Mapping[str, Any], model: str) -> list[float]:
    return sorted(client[model] for client in metrics["clients"] if model in client)


def fairness_picture(lines: Mapping[str, Sequence[float]], path: Path) -> None:
    """Clients from worst to best: the higher a line starts, the smaller the loss of the worst clients."""
    # Imported here: a run needs the functions above, but not every run draws this picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
        metrics, label = read(run), name if names.count(name) == 1 else str(run)
        total = len(metrics["clients"]) + len(metrics.get("not_judged", ()))
        for model in (*MODELS, *WIDER):
            if model in metrics:
                values = accuracies(metrics, model)
                numbers = (f"{metrics[model][key]:.4f}" for key in ("mean", "worst", "std"))
                count = str(total) if len(values) == total else f"{len(values)} of {total}"
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
    check_is_run(run.resolve())
    found = read_object(path)
    if found is None:
        raise UserError(f"{run} holds no personal.json: run it again with personal=true.")
    clients = found.get("clients")
    if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
        raise Damaged(path, "it names no clients")
    return found
