"""A picture of the label distribution over clients.

Drawn on a figure of its own, without pyplot, so that matplotlib's global state stays untouched. The drawing
functions import matplotlib: a run needs this module before its first round, but a picture only later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.disk import whole_file
from fedfrozen_app.report.curves import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 30  # more clients than this are drawn as a heat map
MAX_STACKED = 20  # the same for more classes than this: more colours cannot be distinguished

HATCHES = ("", "////")  # the second ten classes have the colours of the first, hatched


def label_picture(
    counts: np.ndarray,
    classes: Sequence[str],
    names: Sequence[str],
    path: str | Path,
    of: int | None = None,
) -> None:
    """Write a PNG of ``counts`` (clients, classes); ``of``: the number of all clients, if larger."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients, num_classes = counts.shape
    stacked = clients <= MAX_BARS and num_classes <= MAX_STACKED
    short = [_short(name, 22) for name in classes]
    figure = Figure(figsize=_size(clients, num_classes, stacked), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if stacked:
        _bars(axes, counts, short)
        axes.set_yticks(range(clients), [_short(name, 22) for name in names])
    else:
        _heat_map(figure, axes, counts, short)
        rows = range(0, clients, _step(clients, 40))
        axes.set_yticks(rows, [_short(names[row], 22) for row in rows])
    axes.set_ylabel("client")
    some = "" if of in (None, clients) else f" of {of:,}, at even distances"
    title = f"Labels of {counted(clients, 'client')}{some}, {int(counts.sum()):,} examples"
    axes.set_title(title, loc="left")
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png")


def _size(clients: int, num_classes: int, stacked: bool) -> tuple[float, float]:
    """Inches: one line per client, within what a page can show."""
    if stacked:
        legend = 0.22 * num_classes + 1.2
        return 9.0, max(3.0, 0.28 * clients + 1.4, legend)
    return min(16.0, max(7.0, 0.28 * num_classes + 3.5)), min(11.0, max(5.0, 0.1 * clients + 2.0))


def _bars(axes: Axes, counts: np.ndarray, classes: Sequence[str]) -> None:
    positions = np.arange(len(counts))
    left = np.zeros(len(counts))
    for number, name in enumerate(classes):
        turn, colour = divmod(number, len(MUTED))
        axes.barh(
            positions,
            counts[:, number],
            left=left,
            height=0.8,
            color=MUTED[colour],
            hatch=HATCHES[turn],
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
        left += counts[:, number]
    axes.invert_yaxis()
    axes.set_xlabel("examples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small")


def _heat_map(figure: Figure, axes: Axes, counts: np.ndarray, classes: Sequence[str]) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    # White is zero; the square root keeps small counts visible next to large ones.
    shown = axes.imshow(
        np.ma.masked_equal(counts, 0),
        aspect="auto",
        cmap="cividis_r",
        norm=PowerNorm(0.5, vmin=0, vmax=max(1, counts.max())),
        interpolation="nearest",
    )
    ticks = MaxNLocator(nbins=6, integer=True)  # counts are integers
    figure.colorbar(shown, ax=axes, label="examples", pad=0.02, ticks=ticks)
    columns = range(0, len(classes), _step(len(classes), 60))
    crowded = len(classes) > 12 or max(map(len, classes)) > 6
    axes.set_xticks(columns, [classes[column] for column in columns])
    if crowded:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("class")


def _step(count: int, most: int) -> int:
    """The smallest round step that gives at most ``most`` ticks."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    return next(step for step in steps if step * most >= count)


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
