"""The comparison page: groups of runs with means, intervals and tests over their seeds."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.rows import Row, cold_bytes_down, metric_title, number
from fedfrozen_app.report.chart_data import LEAST_SPAN, Chart, chart, curve, rounded
from fedfrozen_app.report.charts import per_unit
from fedfrozen_app.report.compare.grouping import settings_of
from fedfrozen_app.report.compare.model import METRICS, Comparison, Group, Run, heading
from fedfrozen_app.report.compare.tables import WRITTEN, footnotes, sheets
from fedfrozen_app.report.console import human_bytes
from fedfrozen_app.report.curves import Series
from fedfrozen_app.report.html import Table, linked_cell, render_page, save, text

# Okabe and Ito's, the darkest first; strokes distinguish groups of one colour.
COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "ink2", "olive")
STROKES = ("", "dashed", "dotted")
log = logging.getLogger(__name__)
Link = Callable[[Path], str | None]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page; runs that have a report are linked."""
    for run in (run for group in comparison.groups for run in group.runs):
        if not (run.folder / "report.html").is_file():
            log.warning("%s is missing: the comparison does not link it.", run.folder / "report.html")
    save(render(comparison, link=linked(path.parent)), path)
    return path


def linked(folder: Path) -> Link:
    """Links from a page in `folder` to the report of a run, if there is one."""

    def link(run: Path) -> str | None:
        page = run / "report.html"
        return os.path.relpath(page, folder.resolve()) if page.is_file() else None

    return link


def render(
    comparison: Comparison,
    *,
    link: Link = lambda folder: None,
    first: str = "",
    version: str = "",
) -> str:
    """The whole page as text; `first` is a rendered part before the charts. Live with `version`."""
    runs = [(group, run) for group in comparison.groups for run in group.runs]
    return render_page(
        "compare.html",
        _title(comparison),
        charts=make_charts(comparison),
        version=version,
        setting=_setting(comparison),
        scores=_scores(comparison),
        first=first,
        sheets=sheets(comparison),
        notes=footnotes(comparison),
        runs=_runs(comparison, link),
        commands=[
            (f"{group.label}, seed {run.seed}", text(run.summary.get("command", ""))) for group, run in runs
        ],
        common=[(key, text(value)) for key, value in comparison.common.items()],
    )


# Charts ----------------------------------------------------------------------------------------------------


def make_charts(comparison: Comparison) -> list[Chart]:
    metric, groups = comparison.metric, comparison.groups
    looks = _looks(groups)
    label = f"Test {metric_title(metric)}"
    last = max((row["round"] for group in groups for run in group.runs for row in run.rows), default=0)
    rounds = _axis("round", -0.6, last + 0.6, whole=True)
    over = "Mean over the seeds; the band is one standard deviation either way."

    def lines(title: str, key: str) -> Chart:
        made = [_mean_curve(group, key, *looks[group.label]) for group in groups]
        least = LEAST_SPAN if key == f"test_{metric}" else 0.0
        note = f"{over} {equal_curves(made)}".strip()
        return {**chart(title, "", "line", made, rounds, from_zero=False, least=least), "note": note}

    def path(title: str, cost_of: Callable[[Group], dict[int, float]], axis: str, unit: str = "") -> Chart:
        most = max((cost for group in groups for cost in cost_of(group).values()), default=0.0)
        made = [_path(group, f"test_{metric}", cost_of(group), *looks[group.label]) for group in groups]
        x = _axis(axis, 0.0, most * 1.02 or 1.0, unit=unit)
        return {
            **chart(f"{label} against {title}", "", "path", made, x, from_zero=False, least=LEAST_SPAN),
            "note": "Each point is a round: means over the seeds.",
        }

    charts = [
        lines(label, f"test_{metric}"),
        path("megabytes", _megabytes, "sent so far by all clients, both ways", "MB"),
        _dots(comparison, looks),
        lines("Test loss", "test_loss"),
    ]
    rows = [row for group in groups for run in group.runs for row in run.rows]
    if any("virtual_seconds" in row for row in rows):
        charts.insert(2, path("virtual time", _virtual, "virtual time so far", "s"))
    if any("epsilon_max" in row for row in rows):
        charts.append(path(f"epsilon{per_unit(rows)}", _epsilons, "largest epsilon of a client so far"))
    return charts


def equal_curves(made: Sequence[Chart]) -> str:
    """A sentence that names identical curves, which cover each other."""
    alike: dict[str, list[str]] = {}
    for one in made:
        if one["points"]:
            alike.setdefault(str(one["points"]), []).append(one["name"])
    found = [" and ".join(names) for names in alike.values() if len(names) > 1]
    return " ".join(f"Equal in every round, so that one line covers the other: {names}." for names in found)


def _looks(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """Colour and stroke of each group: the strategy sets the colour, other settings the stroke, if enough."""

    def split(group: Group) -> tuple[str, str]:
        named = {key: group.settings[key] for key in group.named_by if key in group.settings}
        rest = {key: value for key, value in named.items() if not key.startswith("strategy.")}
        strategy = {key: value for key, value in named.items() if key not in rest}
        return text(strategy), text(rest)

    colours = list(dict.fromkeys(split(group)[0] for group in groups))
    strokes = list(dict.fromkeys(split(group)[1] for group in groups))
    if len(colours) <= len(COLOURS) and len(colours) > 1 and len(strokes) <= len(STROKES):
        places = [(colours.index(strategy), strokes.index(rest)) for strategy, rest in map(split, groups)]
    else:
        places = [(index % len(COLOURS), index % len(STROKES)) for index in range(len(groups))]
    return {
        group.label: (COLOURS[colour], STROKES[stroke])
        for group, (colour, stroke) in zip(groups, places, strict=True)
    }


def _axis(label: str, low: float, high: float, *, unit: str = "", whole: bool = False) -> Chart:
    return {"label": label, "unit": unit, "from": low, "to": high, "whole": whole, "marks": []}


def _by_round(group: Group, value_of: Callable[[Row], object]) -> dict[int, list[float]]:
    """The values of all seeds, in the rounds in which every seed has a finite one."""
    tables = [{row["round"]: number(value_of(row)) for row in run.rows} for run in group.runs]
    shared = [
        place for place in tables[0] if all(table.get(place, float("nan")) >= -1e300 for table in tables)
    ]
    return {place: [table[place] for table in tables] for place in shared}


def _mean_curve(group: Group, key: str, colour: str, stroke: str) -> Chart:
    values = _by_round(group, lambda row: row.get(key))
    made = curve(
        group.label,
        Series(list(values), [fmean(by_seed) for by_seed in values.values()]),
        colour,
        stroke,
    )
    if len(group.runs) > 1:
        most = math.inf if key == "test_loss" else 1.0
        made["band"] = [
            [
                place,
                rounded(max(0.0, fmean(by_seed) - stdev(by_seed))),
                rounded(min(most, fmean(by_seed) + stdev(by_seed))),
            ]
            for place, by_seed in values.items()
        ]
    return made


def _megabytes(group: Group) -> dict[int, float]:
    """Mean over the seeds of the bytes sent by the end of each round."""
    runs = [
        list(accumulate((row.get("bytes_up") or 0) + cold_bytes_down(row) for row in run.rows))
        for run in group.runs
    ]
    places = [row["round"] for row in group.runs[0].rows]
    return {place: fmean(sums) / 1e6 for place, sums in zip(places, zip(*runs, strict=False), strict=False)}


def _virtual(group: Group) -> dict[int, float]:
    """Mean over the seeds of the virtual time at which each round ended."""
    times = _by_round(group, lambda row: row.get("virtual_seconds"))
    return {place: fmean(by_seed) for place, by_seed in times.items()}


def _epsilons(group: Group) -> dict[int, float]:
    """Mean over the seeds of the largest epsilon that a client had spent by the end of each round."""
    return {
        place: fmean(by_seed)
        for place, by_seed in _by_round(group, lambda row: row.get("epsilon_max")).items()
    }


def _path(group: Group, key: str, costs: dict[int, float], colour: str, stroke: str) -> Chart:
    scores = {place: fmean(by_seed) for place, by_seed in _by_round(group, lambda row: row.get(key)).items()}
    points = [
        (rounded(cost), rounded(scores[place]), f"round {place}")
        for place, cost in costs.items()
        if place in scores
    ]
    return {"name": group.label, "colour": colour, "stroke": stroke, "points": points}


def _dots(comparison: Comparison, looks: dict[str, tuple[str, str]]) -> Chart:
    series = []
    for group in comparison.groups:
        if (spread := group.spreads.get(comparison.tested)) is not None:
            series.append(
                {
                    "name": group.label,
                    "colour": looks[group.label][0],
                    "stroke": "",
                    "mean": rounded(spread.mean),
                    "low": spread.low if spread.low is None else rounded(spread.low),
                    "high": spread.high if spread.high is None else rounded(spread.high),
                    "values": [[f"seed {seed}", rounded(value)] for seed, value in spread.values.items()],
                }
            )
    title = heading(comparison.tested, comparison)
    return {
        "title": title[0].upper() + title[1:],
        "unit": "",
        "kind": "dots",
        "x": _axis(title, 0.0, 1.0),
        "least": LEAST_SPAN,
        "series": series,
        "note": "Large: the mean. Small: the seeds. Line: 95 % interval of the mean (Student's t).",
    }


# Words and tables ------------------------------------------------------------------------------------------


def _title(comparison: Comparison) -> str:
    """ "fedavg, fedprox on digits with vit_tiny", as far as all runs agree."""
    runs = [run for group in comparison.groups for run in group.runs]

    def names(part: str) -> str:
        return ", ".join(dict.fromkeys(_name(run.summary, part) for run in runs))

    words = (("", "strategy"), (" on ", "dataset"), (" with ", "model"))
    return "".join(f"{word}{names(part)}" for word, part in words if names(part)) or "Comparison"


def _name(summary: dict[str, Any], part: str) -> str:
    return text(settings_of(summary).get(f"{part}.name", "")) if summary.get("config") else ""


def _setting(comparison: Comparison) -> str:
    seeds = {run.seed for group in comparison.groups for run in group.runs}
    runs = sum(len(group.runs) for group in comparison.groups)
    counts = ((len(comparison.groups), "group"), (runs, "finished run"), (len(seeds), "seed"))
    words = [counted(number, noun) for number, noun in counts]
    if comparison.baseline:
        described = " ".join(
            f"{key.removesuffix('.name')}={value}" for key, value in comparison.baseline.items()
        )
        words.append(f"baseline {described}")
    if comparison.left_out:
        words.append(f"{len(comparison.left_out)} left out")
    return " · ".join(words)


def _scores(comparison: Comparison) -> list[tuple[str, str]]:
    found = []
    rated = [group for group in comparison.groups if comparison.tested in group.spreads]
    if rated:
        title = heading(comparison.tested, comparison)
        best = max(group.spreads[comparison.tested].mean for group in rated)
        found.append((f"{best:.4f}", f"highest mean {title}: {_who(rated, comparison.tested, best)}"))
    sent = [group for group in comparison.groups if "bytes_up" in group.spreads]
    if sent:
        least = min(group.spreads["bytes_up"].mean for group in sent)
        found.append((human_bytes(least), f"least sent up: {_who(sent, 'bytes_up', least)}"))
    verdicts = [group.test.verdict for group in comparison.groups if group.test]
    if verdicts:
        for word in ("better", "worse"):
            described = f"of {counted(len(verdicts), 'group')} {word} than the baseline"
            found.append((str(verdicts.count(word)), described))
    return found


def _who(groups: Sequence[Group], name: str, mean: float) -> str:
    """All groups with this value: ties have no winner."""
    names = [group.label for group in groups if group.spreads[name].mean == mean]
    if len(names) == 1:
        return names[0]
    return "all alike" if len(names) == len(groups) else f"{' and '.join(names)} alike"


def _runs(comparison: Comparison, link: Link) -> Table:
    shown = [name for name in METRICS if any(name in group.spreads for group in comparison.groups)]

    def cell(run: Run, name: str) -> str:
        value = run.metrics.get(name)
        if name == "rounds_to_target" and not run.reached:
            return "not reached"
        return "" if value is None else WRITTEN.get(name, "{:.4f}".format)(value)

    body = [
        [
            group.label,
            str(run.seed),
            *(cell(run, name) for name in shown),
            linked_cell(run.folder.name, link(run.folder)),
        ]
        for group in comparison.groups
        for run in group.runs
    ]
    return Table(["group", "seed", *(heading(name, comparison) for name in shown), "run"], body)
