"""The chart of epsilon spent over time, as coordinates: the server draws it, since the page runs no
script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fedfrozen_app.sites.history import Spent

WIDTH, HEIGHT = 400, 190  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 40, 392, 22, 160
MOST_STEPS = 5  # of the axis of epsilon
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten: easily readable steps


@dataclass(frozen=True)
class Chart:
    line: str  # points of the steps
    dots: list[tuple[float, float, str]]  # (x, y, label)
    limit: float  # height of the limit's line
    ticks: list[tuple[float, str]]  # of the axis of epsilon
    first: str
    last: str


def budget_chart(spent: Sequence[Spent], limit: float) -> Chart | None:
    """The chart; None if nothing was spent."""
    if not spent:
        return None
    times = [datetime.fromisoformat(one.time).timestamp() for one in spent]
    top = max(limit, spent[-1].epsilon) * 1.1 or 1.0
    begin, width = times[0], max(times[-1] - times[0], 1.0)

    def x(time: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (0.08 + 0.88 * (time - begin) / width), 1)

    def y(epsilon: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * epsilon / top, 1)

    points, height = [(float(LEFT), y(0.0))], y(0.0)
    for time, one in zip(times, spent, strict=True):
        points += [(x(time), height), (x(time), y(one.epsilon))]
        height = y(one.epsilon)
    points.append((float(RIGHT), height))
    return Chart(
        " ".join(f"{a},{b}" for a, b in points),
        [
            (x(time), y(one.epsilon), f"{one.run}: {one.epsilon:g}")
            for time, one in zip(times, spent, strict=True)
        ],
        y(limit),
        [(y(tick), f"{tick:g}") for tick in round_ticks(top)],
        spent[0].time[:10],
        spent[-1].time[:10],
    )


def round_ticks(top: float) -> list[float]:
    """A few round numbers from 0 up to `top`."""
    power = 10.0 ** math.floor(math.log10(top / MOST_STEPS))
    step = next(power * factor for factor in ROUND if power * factor * MOST_STEPS >= top * (1 - 1e-9))
    return [round(n * step, 12) for n in range(int(top / step + 1e-9) + 1)]
