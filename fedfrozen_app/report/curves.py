"""The curves of a run: reading its rows, and plotting them.

A row need not hold every key (rounds that were not evaluated, frozen rounds without kernel drift),
and a diverged run holds NaN. Only `series` distinguishes "absent" from "not finite", so picture, page and
console agree about missing values.
"""

import logging
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedfrozen_app.files.disk import whole_file
from fedfrozen_app.files.rows import Row, capitalised, metric_name, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)


# Okabe and Ito's palette: distinguishable with any of the common colour-vision deficiencies.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
# Paul Tol's "muted" colours, made for colour-blind readers too.
MUTED = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933",
    "#DDCC77", "#CC6677", "#882255", "#AA4499", "#DDDDDD",
)  # fmt: skip


class Series(NamedTuple):
    """The rounds with a value, and the values; values that are not finite numbers are NaN."""

    rounds: list[int]
    values: list[float]


class Line(NamedTuple):
    """One line of a panel."""

    label: str
    series: Series
    colour: str
    dashed: bool = False


class Panel(NamedTuple):
    title: str
    lines: list[Line]
    from_zero: bool = False


def series(rows: Sequence[Row], key: str) -> Series:
    """The values under a dotted key, such as "drift.kernel.rms"; rows without it are skipped."""
    rounds, values = [], []
    for row in rows:
        value: object = row
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            rounds.append(row["round"])
            values.append(number(value))
    return Series(rounds, values)


def running_total(counts: Series, scale: float = 1.0) -> Series:
    """The cumulative sum; values that are not finite add nothing."""
    finite = (0.0 if math.isnan(value) else value * scale for value in counts.values)
    return Series(counts.rounds, list(accumulate(finite)))


def stage_marks(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Stage changes: the point between two rounds, and the name of the new stage."""
    marks = []
    for before, after in pairwise(rows):
        old, new = before.get("stage", "initial"), after.get("stage")
        # The first training round is not a change, unless the run is frozen from the start.
        if new in (None, old) or (old == "initial" and new != "frozen"):
            continue
        label = "kernel frozen" if new == "frozen" else str(new)
        marks.append(((before["round"] + after["round"]) / 2, label))
    return marks


def write_curves(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Write a PNG of four panels: quality, loss, megabytes and client drift."""
    figure = curves_figure(rows, title=title)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=130)


def curves_figure(rows: Sequence[Row], *, title: str) -> "Figure":
    # Imported here, so that the console, which uses the functions above, starts quickly.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(11, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    # A "$" in a name must not start math mode.
    figure.suptitle(title, fontsize=14, fontweight="bold", parse_math=False)
    marks = stage_marks(rows)
    for axes, panel in zip(figure.subplots(2, 2, sharex=True).flat, _panels(rows), strict=True):
        _draw(axes, panel, marks)
    return figure


def _panels(rows: Sequence[Row]) -> list[Panel]:
    metric = metric_name(rows)

    def line(label: str, key: str, colour: str, dashed: bool = False) -> Line:
        return Line(label, series(rows, key), colour, dashed)

    quality = [
        line("test", f"test_{metric}", BLUE),
        line("central validation", f"val_{metric}", VERMILLION, dashed=True),
    ]
    loss = [line("train (clients)", "train_loss", VERMILLION), line("test", "test_loss", BLUE)]
    sent = [
        Line("up", running_total(series(rows, "bytes_up"), 1e-6), BLUE),
        Line("down", running_total(series(rows, "bytes_down"), 1e-6), ORANGE, dashed=True),
    ]
    drift = [
        line("kernel rms", "drift.kernel.rms", VERMILLION),
        line("kernel mean update (norm)", "drift.kernel.mean_update", VERMILLION, dashed=True),
        line("rest rms", "drift.rest.rms", BLUE),
        line("rest mean update (norm)", "drift.rest.mean_update", BLUE, dashed=True),
    ]
    return [
        Panel(f"{capitalised(metric)} after each round", quality),
        Panel("Loss", loss),
        Panel("Megabytes sent so far, all clients", sent, from_zero=True),
        Panel("Client drift", drift, from_zero=True),
    ]


def _draw(ax: "Axes", panel: Panel, marks: Sequence[tuple[float, str]]) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(panel.title, loc="left", fontsize=11, pad=18)  # room for the label of a stage
    ax.spines[["top", "right"]].set_visible(False)
    drawn = [line for line in panel.lines if not all(map(math.isnan, line.series.values))]
    missing = [f"no {line.label}" for line in panel.lines if line not in drawn]
    if not drawn:
        ax.set_axis_off()
        text = "Nothing to draw in these rounds:\n" + "\n".join(missing)
        ax.text(0.5, 0.5, text, ha="center", va="center", color="0.35", transform=ax.transAxes)
        return
    few = max(len(line.series.rounds) for line in drawn) <= 60
    for line in drawn:
        style = "--" if line.dashed else "-"
        gaps = sum(map(math.isnan, line.series.values))
        if gaps:
            missing.append(f"{line.label}: {gaps} not finite")
        ax.plot(*line.series, style, color=line.colour, label=line.label, lw=1.8)
        ax.plot(*line.series, "o", color=line.colour, ms=3.5 if few else 1)
    for place, label in marks:
        ax.axvline(place, color="0.35", lw=1, ls=":")
        ax.annotate(
            label,
            (place, 1),
            xycoords=ax.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color="0.25",
            parse_math=False,
        )
    ax.set_xlabel("round")
    ax.tick_params(labelbottom=True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    note = "\n".join(missing) or None
    ax.legend(frameon=False, fontsize=9, title=note, title_fontsize=8)
