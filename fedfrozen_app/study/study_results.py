"""survival.json: curves, tests and coefficients as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfrozen_app.study.site_sums import SiteCounts
from fedfrozen_app.study.study_ask import FORMAT, StudyAsk
from fedfrozen_app.survival.counts import Counts
from fedfrozen_app.survival.cox import Cox
from fedfrozen_app.survival.estimates import Curve, LogRank, curves, log_rank
from fedfrozen_app.survival.people import ALL


def results(
    ask: StudyAsk,
    sites: Mapping[str, dict[str, Any]],
    refused: Mapping[str, str],
    counts: Counts,
    cox: Cox | None,
    problem: str,
) -> dict[str, Any]:
    levels = ask.columns.levels
    test = log_rank(counts) if len(levels) > 1 else None
    groups = curves(counts)
    return {
        "format": FORMAT,
        "asked": {"hash": ask.hash, **ask.plain},
        "sites": dict(sorted(sites.items())),
        "refused": dict(sorted(refused.items())),
        "all": _curve(ALL, curves(counts.all_groups())[0]),
        "groups": [_curve(level, one) for level, one in zip(levels, groups, strict=True)]
        if len(levels) > 1
        else [],
        "log_rank": None if test is None else _log_rank(test, levels),
        "cox": None if cox is None else _cox(cox),
        "problem": problem,
    }


def site_results(ask: StudyAsk, answers: Mapping[str, SiteCounts]) -> dict[str, dict[str, Any]]:
    return {name: _site(found, ask.columns.levels) for name, found in answers.items()}


def masked_site(floor: int, *, withheld: bool) -> dict[str, Any]:
    """The entry of a site in a masked sum, of which nothing else is known."""
    return {
        **dict.fromkeys(("people", "events", "groups", "left_out")),
        "floor": floor,
        "withheld": withheld,
    }


def _site(found: SiteCounts, levels: tuple[str, ...]) -> dict[str, Any]:
    events = groups = None
    if found.tables is not None:
        events = int(sum(sum(pair["events"]["people"]) for pair in found.tables))
        groups = {
            level: int(sum(sum(table["people"]) for table in pair.values()))
            for level, pair in zip(levels, found.tables, strict=True)
        }
    return {
        "people": found.people,
        "events": events,
        "groups": groups,
        "left_out": found.left_out,
        "floor": found.floor,
        "withheld": found.tables is None,
    }


def _curve(name: str, curve: Curve) -> dict[str, Any]:
    low, high = curve.interval
    return {
        "name": name,
        "people": _plain(curve.at_risk[0]) if len(curve.times) else 0,
        "events": _plain(curve.events.sum()),
        "median": curve.quantile(),
        "times": curve.times.tolist(),
        "at_risk": [_plain(one) for one in curve.at_risk],
        "event_counts": [_plain(one) for one in curve.events],
        "censored": [_plain(one) for one in curve.censored],
        "survival": curve.survival.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "hazard": curve.hazard.tolist(),
        "hazard_error": curve.hazard_error.tolist(),
    }


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else round(float(value), 6)


def _log_rank(test: LogRank, levels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "statistic": test.statistic,
        "degrees": test.degrees,
        "p": test.p,
        "observed": dict(zip(levels, test.observed, strict=True)),
        "expected": dict(zip(levels, test.expected, strict=True)),
    }


def _cox(cox: Cox) -> dict[str, Any]:
    low, high = cox.interval
    statistic, p = cox.ratio_test
    rows = zip(
        cox.names, cox.coefficients, cox.errors, np.exp(cox.coefficients), low, high, cox.p, strict=True
    )
    keys = ("name", "coefficient", "error", "hazard_ratio", "low", "high", "p")
    return {
        "ties": cox.ties,
        "strata": "site" if cox.stratified else "none",
        "covariates": [
            {key: one if key == "name" else float(one) for key, one in zip(keys, row, strict=True)}
            for row in rows
        ],
        "log_likelihood": cox.value,
        "likelihood_ratio": {"statistic": statistic, "degrees": len(cox.names), "p": p},
        "steps": cox.steps,
    }
