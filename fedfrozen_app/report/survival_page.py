"""survival.html: curves with people at risk, tests and coefficients, on one self-contained page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.report.chart_data import Chart
from fedfrozen_app.report.html import Table, render_page, save

COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "wine", "olive", "indigo", "yellow")
MARKS = 7  # times of the table of people at risk
MOST_LINES = 400  # in the table of all times
MOST_INTERVALS = 2  # curves drawn with their intervals
Study = Mapping[str, Any]


def write_page(study: Study, folder: Path) -> None:
    save(page(study), folder / "survival.html")


def page(study: Study) -> str:
    shown = study["groups"] or [study["all"]]
    return render_page(
        "survival.html",
        "Survival",
        charts=[
            _chart("Survival", "share, by Kaplan and Meier", shown, "survival", 1.0, study),
            _chart("Cumulative hazard", "by Nelson and Aalen", shown, "hazard", 0.0, study),
        ],
        counted_sites=counted(sum(not one["withheld"] for one in study["sites"].values()), "site"),
        what=_what(study),
        warnings=_warnings(study),
        cards_shown=_cards(study),
        at_risk=_at_risk(study, shown),
        medians=_medians(study),
        log_rank=_log_rank(study),
        log_rank_text=_log_rank_text(study),
        cox=_cox(study),
        cox_text=_cox_text(study),
        by_site=_by_site(study),
        every=_every(shown),
        rules=_rules(study),
    )


def _what(study: Study) -> str:
    asked = study["asked"]
    edges = asked["edges"]
    between = (
        "exact times" if edges is None else f"times rounded up to {len(edges) - 1} edges, until {edges[-1]:g}"
    )
    noise = [f"noise of epsilon {asked['epsilon']:g} for each person"] if asked["epsilon"] else []
    masks = [f"masked sums over {counted(len(study['masks']['sites']), 'site')}"] if "masks" in study else []
    return " · ".join([f"{asked['event']} by {asked['time']}", between, *noise, *masks])


def _warnings(study: Study) -> list[str]:
    found = [f"{name} gave nothing: {why}." for name, why in study["refused"].items()]
    for name, site in study["sites"].items():
        if site["withheld"]:
            found.append(
                f"{name} takes no part: a group of it has too few people for its counts to leave it."
            )
        elif site["people"] == 0:
            found.append(f"{name} has no row with all values: it adds nothing.")
    if study["problem"]:
        found.append(f"No regression: {study['problem']}")
    if study["asked"]["epsilon"]:
        found.append(
            "The counts hold noise, which the intervals and the test do not know of: they are too narrow."
        )
    return found


def _cards(study: Study) -> list[tuple[str, str]]:
    whole = study["all"]
    found = [
        (f"{whole['people']:,g}", "people"),
        (f"{whole['events']:,g}", "events"),
        (_time(whole["median"]), "median"),
    ]
    if study["log_rank"] is not None:
        found.append((_p(study["log_rank"]["p"]), "p of the log-rank test"))
    return found


def _time(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,g}"


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


# Curves ----------------------------------------------------------------------------------------------------


def _chart(title: str, unit: str, shown: Sequence[Study], key: str, start: float, study: Study) -> Chart:
    last = max((one["times"][-1] for one in shown if one["times"]), default=1.0)
    series = []
    for number, one in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        points = _steps(one, key, start)
        style = {"name": one["name"], "colour": colour, "stroke": "", "points": points}
        if key == "survival" and len(shown) <= MOST_INTERVALS:
            pairs = zip(_steps(one, "low", 1.0), _steps(one, "high", 1.0), strict=True)
            style["band"] = [[time, low, high] for (time, low), (_, high) in pairs]
        series.append(style)
    return {
        "title": title,
        "unit": unit,
        "kind": "path",
        "x": {
            "label": study["asked"]["time"],
            "unit": "",
            "from": 0,
            "to": last,
            "whole": False,
            "marks": [],
        },
        "from_zero": True,
        "least": 1.0 if key == "survival" else 0.0,
        "series": series,
        "steps": True,
        "note": "",
    }


def _steps(one: Study, key: str, start: float) -> list[list[float]]:
    """Two points per event: the curve is constant between events."""
    points, value = [[0.0, start]], start
    for time, after, events in zip(one["times"], one[key], one["event_counts"], strict=True):
        if events:
            points += [[time, round(value, 5)], [time, round(after, 5)]]
            value = after
    return [*points, [_last(one), round(value, 5)]]


def _last(one: Study) -> float:
    """The last time at which anyone in the group is at risk; its curve ends there."""
    return max(
        (time for time, risk in zip(one["times"], one["at_risk"], strict=True) if risk > 0), default=0.0
    )


# Tables ----------------------------------------------------------------------------------------------------


def marks(last: float) -> list[float]:
    """Round times from 0, for the table of people at risk."""
    if last <= 0:
        return [0.0]
    rough = last / (MARKS - 1)
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    return [float(one) for one in np.arange(0, last + step * 1e-9, step)]


def _before(one: Study, time: float) -> float:
    """People at risk just before a time."""
    place = int(np.searchsorted(one["times"], time, side="left"))
    return one["at_risk"][place] if place < len(one["times"]) else 0


def _after(one: Study, key: str, time: float) -> float:
    place = int(np.searchsorted(one["times"], time, side="right"))
    return one[key][place - 1] if place else 1.0


def _marks_of(shown: Sequence[Study]) -> list[float]:
    return marks(max((one["times"][-1] for one in shown if one["times"]), default=0.0))


def _at_risk(study: Study, shown: Sequence[Study]) -> Table:
    times = _marks_of(shown)
    body = [[one["name"], *(f"{_before(one, time):,g}" for time in times)] for one in shown]
    return Table([study["asked"]["time"], *(f"{time:,g}" for time in times)], body)


def _medians(study: Study) -> Table:
    shown = [*study["groups"], study["all"]]
    times = _marks_of(shown)[1:]
    head = ["", "people", "events", "median", *(f"at {time:,g}" for time in times)]
    body = []
    for one in shown:
        cells = []
        for time in times:
            if time <= _last(one):
                low, high = _after(one, "low", time), _after(one, "high", time)
                cells.append(f"{_after(one, 'survival', time):.1%} ({low:.0%}–{high:.0%})")
            else:
                cells.append("")
        body.append([one["name"], f"{one['people']:,g}", f"{one['events']:,g}", _time(one["median"]), *cells])
    return Table(head, body)


def _log_rank(study: Study) -> Table | None:
    test = study["log_rank"]
    if test is None:
        return None
    body = [
        [name, f"{test['observed'][name]:,g}", f"{test['expected'][name]:,.2f}"] for name in test["observed"]
    ]
    return Table([str(study["asked"]["group"]), "events", "expected if all were alike"], body)


def _log_rank_text(study: Study) -> str:
    test = study["log_rank"]
    if test is None:
        return ""
    degrees = counted(test["degrees"], "degree")
    return f"Chi² {test['statistic']:.3f} with {degrees} of freedom, p {_p(test['p'])}."


def _cox(study: Study) -> Table | None:
    if study["cox"] is None:
        return None
    body = [
        [
            one["name"],
            f"{one['coefficient']:.4f}",
            f"{one['error']:.4f}",
            f"{one['hazard_ratio']:.3f}",
            f"{one['low']:.3f} to {one['high']:.3f}",
            _p(one["p"]),
        ]
        for one in study["cox"]["covariates"]
    ]
    return Table(["covariate", "coefficient", "standard error", "hazard ratio", "95 % interval", "p"], body)


def _cox_text(study: Study) -> str:
    cox = study["cox"]
    if cox is None:
        return ""
    ratio = cox["likelihood_ratio"]
    strata = ", each site with its own baseline" if cox["strata"] == "site" else ""
    return (
        f"{cox['ties'].capitalize()}'s rule for ties{strata}. All coefficients together: likelihood ratio "
        f"{ratio['statistic']:.3f}, {counted(ratio['degrees'], 'degree')} of freedom, p {_p(ratio['p'])}. "
        f"Found in {counted(cox['steps'], 'step')}."
    )


def _by_site(study: Study) -> Table:
    levels = study["asked"]["levels"] if study["groups"] else []
    body = []
    for name, site in study["sites"].items():
        groups = [_number(None if site["groups"] is None else site["groups"][level]) for level in levels]
        body.append(
            [name, _number(site["people"]), _number(site["events"]), *groups, _number(site["left_out"])]
        )
    return Table(["site", "people", "events", *levels, "rows left out"], body)


def _number(value: float | None) -> str:
    return "not said" if value is None else f"{value:,g}"


def _masks(study: Study) -> str:
    if "masks" not in study:
        return "none: the server saw each site's counts"
    return f"the server saw sums over {', '.join(study['masks']['sites'])} alone"


def _every(shown: Sequence[Study]) -> Table:
    head = ["group", "time", "at risk", "events", "censored", "survival", "95 % interval", "hazard"]
    keys = ("times", "at_risk", "event_counts", "censored", "survival", "low", "high", "hazard")
    body: list[list[str]] = []
    for one in shown:
        for time, risk, events, censored, survival, low, high, hazard in zip(
            *(one[key] for key in keys), strict=True
        ):
            if events and len(body) < MOST_LINES:
                interval = f"{low:.4f} to {high:.4f}"
                cells = (
                    f"{time:,g}",
                    f"{risk:,g}",
                    f"{events:,g}",
                    f"{censored:,g}",
                    f"{survival:.4f}",
                    interval,
                )
                body.append([one["name"], *cells, f"{hazard:.4f}"])
    return Table(head, body)


def _rules(study: Study) -> list[tuple[str, str]]:
    asked = study["asked"]
    edges = asked["edges"]
    return [
        ("study", asked["hash"]),
        ("edges", "none: exact times" if edges is None else ", ".join(f"{edge:g}" for edge in edges)),
        (
            "shown",
            ", ".join(f"{time:g}" for time in study["all"]["times"]) if edges is not None else "every time",
        ),
        ("noise", f"epsilon {asked['epsilon']:g} for each person" if asked["epsilon"] else "none"),
        ("masks", _masks(study)),
        ("floors", ", ".join(f"{site} {found['floor']}" for site, found in study["sites"].items())),
    ]
