"""Debugging tools for a run's rounds: `debug=nan` and `debug=profile`."""

import cProfile
import io
import pstats
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch

from fedfrozen_app.config import DebugConfig
from fedfrozen_app.files.disk import replace_file, whole_file
from fedfrozen_app.files.rows import Row, number, read_rows

MOST_FUNCTIONS = 15
BLUE, ORANGE = "#0072B2", "#E69F00"


@contextmanager
def debugging(settings: DebugConfig, folder: Path) -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(settings.nan):
        if not settings.profile:
            yield
            return
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            yield
        finally:
            profiler.disable()
            write_profile(profiler, folder)


def write_profile(profiler: cProfile.Profile, folder: Path) -> None:
    """Write profile.txt (functions sorted by own time) and profile.png (a round's phases, the top
    functions)."""
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats()
    replace_file(folder / "profile.txt", text.getvalue())
    draw(phases(read_rows(folder)), functions(stats), folder / "profile.png")


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of each phase of a round; the first round, which compiles, counts only if it is alone."""
    trained = [row["seconds"] for row in rows if row["round"] > 0 and row.get("seconds")]
    counted = trained[1:] or trained
    names = dict.fromkeys(name for seconds in counted for name in seconds if name != "total")
    means = {name: fmean(number(seconds.get(name, 0.0)) for seconds in counted) for name in names}
    total = fmean(number(seconds.get("total")) for seconds in counted) if counted else 0.0
    if (rest := total - sum(means.values())) > 0:
        means["other"] = rest
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def functions(stats: pstats.Stats) -> dict[str, float]:
    """Own seconds of the slowest functions, over the whole run."""
    found = stats.stats  # type: ignore[attr-defined]  # (file, line, name): (calls, ..., own, with others, who)
    busiest = sorted(found.items(), key=lambda item: -item[1][2])[:MOST_FUNCTIONS]
    return {_named(place): times[2] for place, times in busiest}


def _named(place: tuple[str, int, str]) -> str:
    file, line, name = place
    return name.strip("<>") if file == "~" else f"{Path(file).name}:{line} {name}"


def draw(by_phase: dict[str, float], by_function: dict[str, float], path: Path) -> None:
    # Lazy import: every run needs this module, but only debug=profile the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, width_ratios=(1, 1.3))
    titles = ("A round, by phase (mean, seconds)", "The whole run, by function (own seconds)")
    for axes, values, title, colour in zip(
        panels, (by_phase, by_function), titles, (BLUE, ORANGE), strict=True
    ):
        places = range(len(values))
        axes.barh(places, list(values.values()), color=colour)
        axes.set_yticks(places, [name[-45:] for name in values], fontsize=9)
        axes.invert_yaxis()
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=110)
