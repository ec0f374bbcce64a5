"""A Gantt chart in virtual time: a bar for each client and round, as inline SVG."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from fedfrozen_app.files.rows import Row
from fedfrozen_app.report.gantt_bars import (
    CLIENTS,
    HEIGHT,
    LEAST,
    LEFT,
    PARTS,
    WIDTH,
    Bar,
    labels_of,
    names_of,
)
from fedfrozen_app.report.html import render_part
from fedfrozen_app.report.paced_gantt import NOTE, is_paced, paced_pictures

ROUNDS = 4  # shown in a chart at most
STEP = 100  # distance between legend entries


def gantt_section(rows: Sequence[Row]) -> Markup | None:
    """The first rounds of the first and of the last stage; None without virtual time."""
    timed = [row for row in rows if row.get("virtual_by_client")]
    if not timed:
        return None
    paced = is_paced(rows)
    pictures = paced_pictures(rows) if paced else _round_by_round(rows, _shown(timed))
    hidden = len({name for row in timed for name in row["virtual_by_client"]}) > CLIENTS
    return render_part(
        "gantt.html",
        pictures=pictures,
        note=NOTE if paced else "",
        legend=[(name, colour, LEFT + STEP * place) for place, (name, colour) in enumerate(PARTS)],
        clients=CLIENTS if hidden else None,
        left=LEFT,
        width=LEFT + WIDTH,
        bar_height=HEIGHT - 4,
    )


def _round_by_round(rows: Sequence[Row], shown: Sequence[Row]) -> list[dict[str, Any]]:
    names = names_of(name for row in shown for name in row["virtual_by_client"])
    begins = {row["round"]: before.get("virtual_seconds", 0.0) for before, row in _pairs(rows)}
    longest = max(row["virtual_seconds"] - begins[row["round"]] for row in shown)
    return [_picture(row, begins[row["round"]], names, longest) for row in shown]


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    return list(zip([{}, *rows], rows, strict=False))


def _shown(timed: Sequence[Row]) -> list[Row]:
    """Rounds of the first and of the last stage, which show what freezing saves."""
    first = [row for row in timed if row.get("stage") == timed[0].get("stage")]
    last = [row for row in timed if row.get("stage") == timed[-1].get("stage")]
    return list(first[: ROUNDS // 2]) + (last[: ROUNDS // 2] if last[0] is not first[0] else [])


def _picture(row: Row, begin: float, names: Sequence[str], longest: float) -> dict[str, Any]:
    """One round, drawn to the scale of the longest."""
    times, length = row["virtual_by_client"], row["virtual_seconds"] - begin
    bars = []
    for line, name in enumerate(names):
        x = float(LEFT)
        for (part, colour), seconds in zip(PARTS, times.get(name, ()), strict=False):
            width = WIDTH * seconds / longest if longest else 0.0
            if width > LEAST * WIDTH:
                title = f"client {name} {part} {seconds:.3g} s"
                bars.append(Bar(round(x, 2), line * HEIGHT + 2, round(width, 2), colour, title))
            x += width
    stage = f", {row['stage']}" if row.get("stage") else ""
    return {
        "title": f"Round {row['round']}{stage}: {length:.3g} s from {begin:.4g} s on",
        "bars": bars,
        "marks": [],
        "steps": [],
        "labels": labels_of(names),
        "height": len(names) * HEIGHT + 2,
    }
