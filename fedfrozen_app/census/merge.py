"""Merges the sites' answers to one census: pooled tables, and distances between sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from fedfrozen_app.data.partition_like import class_rows

FORMAT = 1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Answers = Mapping[str, Mapping[str, Any]]


def merge(answers: Answers, refused: Mapping[str, str]) -> dict[str, Any]:
    """The content of census.json except for the advice; independent of the order of the answers."""
    answers = {name: answers[name] for name in sorted(answers, key=_in_order)}
    refused = {name: refused[name] for name in sorted(refused, key=_in_order)}
    names = list(dict.fromkeys(name for found in answers.values() for name in found["tables"]))
    tables = {name: [found["tables"].get(name) for found in answers.values()] for name in names}
    means = list(dict.fromkeys(name for found in answers.values() for name in found["moments"]))
    pooled: dict[str, Any] = {
        "rows": _sum(found["rows"] for found in answers.values()),
        "people": _sum(found["people"] for found in answers.values()),
        "tables": {name: pool(parts) for name, parts in tables.items()},
        "moments": {
            name: pool_moments([found["moments"].get(name) for found in answers.values()]) for name in means
        },
    }
    pooled["quantiles"] = {
        name: found
        for name, table in pooled["tables"].items()
        if table is not None and "edges" in table and (found := quantiles(table)) is not None
    }
    shares = class_shares(answers)
    return {
        "format": FORMAT,
        "task": next((found["task"] for found in answers.values()), None),
        "sites": {name: {k: v for k, v in found.items() if k != "hashes"} for name, found in answers.items()},
        "refused": refused,
        "pooled": pooled,
        "distances": distances(answers, shares),
        "alpha": alpha(class_counts(answers)),
        "matches": matches(answers),
    }


def _in_order(name: str) -> tuple[int, str]:
    """Sort key: simulated clients are numbers, so 10 comes after 9."""
    return (int(name), "") if name.isdecimal() else (-1, name)


def _sum(values: Any) -> int | None:
    found = list(values)
    return None if not found or None in found else sum(found)


# Tables ---------------------------------------------------------------------------------------------------


def pool(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Sum a table over the sites that reported it; cells that one of them hides are left out."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if "edges" in known[0]:
        return pool_intervals(known)
    hidden = {name for part in known for name in part["hidden"]}
    names = list(dict.fromkeys(name for part in known for name in part["people"]))
    shown = [name for name in names if name not in hidden]
    return {
        "sites": len(known),
        "total": sum(part["total"] for part in known),
        "people": {name: sum(part["people"].get(name, 0) for part in known) for name in shown},
        "rows": {name: sum(part["rows"].get(name, 0) for part in known) for name in shown},
        "hidden": sorted(hidden),
        "others_hidden": any(part["others_hidden"] for part in known),
    }


def pool_intervals(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum over the edges that all of them show; rows without a value are separate if all show them
    separately."""
    edges = sorted(set.intersection(*(set(part["edges"]) for part in known)))
    people, rows = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for part in known:
        place = np.searchsorted(edges, part["edges"][:-1], side="right") - 1
        people += np.bincount(place, weights=part["people"], minlength=len(edges) - 1)
        rows += np.bincount(place, weights=part["rows"], minlength=len(edges) - 1)
    apart = all(part["none"] is not None for part in known)
    none = {key: sum(part["none"][key] for part in known) for key in ("people", "rows")} if apart else None
    found = {"people": people.astype(int).tolist(), "rows": [_plain(value) for value in rows]}
    return {"sites": len(known), "edges": edges, **found, "none": none}


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


def pool_moments(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Pool exactly from counts, means and variances; a site that withholds its count is left out."""
    known = [part for part in parts if part is not None and part["rows"] is not None]
    if not known:
        return None
    rows = np.array([part["rows"] for part in known], dtype=float)
    means = np.array([part["mean"] for part in known])
    within = np.array([part["variance"] for part in known])
    mean = float((rows * means).sum() / rows.sum())
    variance = float((rows * (within + (means - mean) ** 2)).sum() / rows.sum())
    people = sum(part["people"] for part in known)
    return {
        "sites": len(known),
        "rows": int(rows.sum()),
        "people": people,
        "mean": mean,
        "variance": variance,
    }


def quantiles(table: Mapping[str, Any]) -> dict[str, dict[str, float]] | None:
    """Quantiles, each with its interval [low, high] and a linear interpolation within it."""
    rows, edges = np.asarray(table["rows"], dtype=float), table["edges"]
    if not rows.sum():
        return None
    reached = np.cumsum(rows) / rows.sum()
    found = {}
    for share in QUANTILES:
        cell = min(int(np.searchsorted(reached, share - 1e-12)), len(rows) - 1)
        before = reached[cell - 1] if cell else 0.0
        low, high = edges[cell], edges[cell + 1]
        within = (share - before) / max(reached[cell] - before, 1e-12)
        found[f"{share:g}"] = {"low": low, "high": high, "value": low + within * (high - low)}
    return found


# Distances ------------------------------------------------------------------------------------------------


def class_counts(answers: Answers) -> dict[str, dict[str, float]]:
    """By site, the rows of each class that any site has."""
    known = {
        site: class_rows(table)
        for site, found in answers.items()
        if (table := found["tables"].get("classes")) is not None
    }
    names = dict.fromkeys(name for own in known.values() for name in own)
    return {site: {name: own.get(name, 0.0) for name in names} for site, own in known.items()}


def class_shares(answers: Answers) -> dict[str, dict[str, float]]:
    found = {}
    for site, counts in class_counts(answers).items():
        total = sum(counts.values())
        if total:
            found[site] = {name: count / total for name, count in counts.items()}
    return found


def distances(answers: Answers, shares: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Total variation: the share of one site's rows that would have to change to look like the other's."""
    label = {
        _pair(one, other): 0.5 * sum(abs(shares[one][name] - shares[other][name]) for name in shares[one])
        for one, other in combinations(shares, 2)
    }
    features: dict[str, dict[str, float]] = {}
    for one, other in combinations(answers, 2):
        for name, table in answers[one]["tables"].items():
            twin = answers[other]["tables"].get(name)
            if table is None or twin is None or "edges" not in table:
                continue
            if (apart := interval_distance(table, twin)) is not None:
                features.setdefault(_pair(one, other), {})[name] = apart
    return {"labels": label, "features": features}


def _pair(one: str, other: str) -> str:
    return f"{one} | {other}"


def interval_distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Total variation over the edges that both show; None if one of them has no rows."""
    both = [
        pool_intervals([part, {**twin, "rows": [0] * len(twin["rows"])}]) for part, twin in _both(one, other)
    ]
    shares = [np.asarray(part["rows"], dtype=float) for part in both]
    if not all(part.sum() for part in shares):
        return None
    return float(0.5 * np.abs(shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).sum())


def _both(one: Any, other: Any) -> list[tuple[Any, Any]]:
    return [(one, other), (other, one)]


def alpha(counts: Mapping[str, Mapping[str, float]]) -> float | None:
    """The maximum-likelihood Dirichlet concentration of these label counts, as `partition=dirichlet` draws
    them: for every class, the clients' shares of its rows. None if it cannot be estimated."""
    from scipy.optimize import minimize_scalar
    from scipy.special import gammaln

    table = np.array([[own[name] for own in counts.values()] for name in next(iter(counts.values()), ())])
    if table.size == 0 or table.shape[1] < 2:
        return None
    table = table[table.sum(axis=1) > 0]
    sites = table.shape[1]

    def cost(log_alpha: float) -> float:
        concentration = math.exp(log_alpha)
        each = gammaln(table + concentration).sum(axis=1) - sites * gammaln(concentration)
        whole = gammaln(sites * concentration) - gammaln(table.sum(axis=1) + sites * concentration)
        return -float((each + whole).sum())

    found = minimize_scalar(cost, bounds=(math.log(1e-3), math.log(1e3)), method="bounded")
    return float(f"{math.exp(found.x):.3g}")


def matches(answers: Answers) -> dict[str, Any] | None:
    """The number of contents that each pair of sites shares; None unless every site has sent its hashes."""
    if len(answers) < 2 or not all("hashes" in found for found in answers.values()):
        return None
    held = {site: set(found["hashes"]) for site, found in answers.items()}
    found: dict[str, Any] = {}
    for one, other in combinations(held, 2):
        shared = len(held[one] & held[other])
        floor = max(answers[one]["floor"], answers[other]["floor"])
        found[_pair(one, other)] = shared if shared == 0 or shared >= floor else f"fewer than {floor}"
    return found
