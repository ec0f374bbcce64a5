"""The Gantt chart of an asynchronous run: clients' requests over a period of virtual time, the server's steps
as lines, and each reply's staleness."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.files.rows import Row
from fedfrozen_app.report.gantt_bars import HEIGHT, LEAST, LEFT, PARTS, WIDTH, Bar, labels_of, names_of

STEPS = 6  # of the server shown in one picture
MARK = 3  # width of the mark at a reply
NOTE = (
    "Lines are the server's steps. Green: a reply that counts in the step that it was asked for; orange: so "
    "many steps later, by its staleness weight; ×: dropped."
)


@dataclass(frozen=True)
class Request:
    """One client's request and the outcome of its reply."""

    client: str
    asked: float
    seconds: Sequence[float]  # for each of PARTS
    age: int | None = None  # staleness in server steps; None: not arrived
    dropped: bool = False

    @property
    def arrives(self) -> float:
        return self.asked + sum(self.seconds)


def is_paced(rows: Sequence[Row]) -> bool:
    return any("pacing" in row for row in rows)


def requests_of(rows: Sequence[Row]) -> list[Request]:
    """All requests, with replies from the row of the round in which they arrived."""
    ages: dict[tuple[str, int], tuple[int, bool]] = {}
    for row in rows:
        for kind in ("used", "dropped"):
            for client, age in row.get("pacing", {}).get(kind, ()):
                ages[client, row["round"] - age] = age, kind == "dropped"
    return [
        Request(
            client, row["virtual_asked"][client], seconds, *ages.get((client, row["round"]), (None, False))
        )
        for row in rows
        for client, seconds in row.get("virtual_by_client", {}).items()
        if client in row.get("virtual_asked", {})
    ]


def paced_pictures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The first steps of the server, and the first steps of the last stage."""
    timed = [row for row in rows if "virtual_seconds" in row]
    last = next((n for n, row in enumerate(timed) if n and row.get("stage") == timed[-1].get("stage")), 1)
    starts = [1] if last <= STEPS else [1, last]
    stretches = [timed[start - 1 : start + STEPS] for start in starts]  # including the row before the first
    requests = requests_of(rows)
    return [_picture(stretch, requests) for stretch in stretches if len(stretch) > 1]


def _picture(stretch: Sequence[Row], requests: Sequence[Request]) -> dict[str, Any]:
    begin, end = stretch[0]["virtual_seconds"], stretch[-1]["virtual_seconds"]
    scale = WIDTH / (end - begin) if end > begin else 0.0
    shown = [one for one in requests if one.asked <= end and one.arrives >= begin]
    names = names_of({one.client for one in shown})
    lines = {name: line for line, name in enumerate(names)}
    shown = [one for one in shown if one.client in lines]

    def x(time: float) -> float:
        return round(LEFT + (min(max(time, begin), end) - begin) * scale, 2)

    bars = [bar for one in shown for bar in _bars(one, lines, x)]
    marks = [_mark(one, lines, x) for one in shown if one.age is not None and begin <= one.arrives <= end]
    first, last = stretch[1]["round"], stretch[-1]["round"]
    return {
        "title": f"Rounds {first} to {last}: {end - begin:.3g} s from {begin:.4g} s on",
        "bars": bars,
        "marks": marks,
        "steps": [min(x(row["virtual_seconds"]), LEFT + WIDTH - 1) for row in stretch[1:]],
        "labels": labels_of(names),
        "height": len(names) * HEIGHT + 2,
    }


def _bars(one: Request, lines: Mapping[str, int], x: Any) -> Iterator[Bar]:
    time = one.asked
    for (part, colour), seconds in zip(PARTS, one.seconds, strict=False):
        left, right = x(time), x(time + seconds)
        if right - left > LEAST * WIDTH:
            title = f"client {one.client} {part} {seconds:.3g} s"
            yield Bar(left, lines[one.client] * HEIGHT + 2, round(right - left, 2), colour, title)
        time += seconds


def _mark(one: Request, lines: Mapping[str, int], x: Any) -> dict[str, Any]:
    """The mark at its reply: fresh, stale by `age` steps, or dropped."""
    text = "×" if one.dropped else str(one.age) if one.age else ""
    age = f"{one.age} steps old" if one.age else "of this step"
    return {
        "x": round(x(one.arrives) - MARK, 2),
        "y": lines[one.client] * HEIGHT + 2,
        "width": MARK,
        "colour": "wine" if one.dropped else "orange" if one.age else "green",
        "text": text,
        "title": f"client {one.client}: {'dropped, ' if one.dropped else ''}{age}",
    }
