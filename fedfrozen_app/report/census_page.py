"""census.html: whether the sites' data fit together, on one self-contained page."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.report.census_charts import NONE, heat_map, histograms, value_title
from fedfrozen_app.report.html import Table, render_page, save

Census = Mapping[str, Any]
CONTENT = {
    "image": "pictures",
    "text": "texts",
    "multilabel": "texts with several labels",
    "tokens": "words",
    "language": "prompts and answers",
}


class Distance(NamedTuple):
    """The distance of two sites, and the value in which they differ most."""

    share: float
    name: str = ""


def write_page(census: Census, folder: Path) -> None:
    save(page(census), folder / "census.html")


def page(census: Census) -> str:
    labels, features = _distances(census)
    return render_page(
        "census.html",
        "Census",
        charts=histograms(census),
        counted_sites=counted(len(census["sites"]), "site"),
        what=_what(census),
        refused=census["refused"],
        counts=_counts(census),
        advice=census["advice"],
        classes=heat_map(census),
        sites=list(census["sites"]),
        by_site=_by_site(census),
        labels=labels,
        features=features,
        matches=[
            [pair.replace(" | ", " and "), str(count)] for pair, count in (census["matches"] or {}).items()
        ],
        moments=_moments(census),
        missing=_missing(census),
        words=_words(census),
        rules=_rules(census),
    )


def _what(census: Census) -> str:
    floors = sorted({found["floor"] for found in census["sites"].values()})
    hidden = f"cells of fewer than {' or '.join(map(str, floors))} people are not shown"
    noise = census["asked"]["epsilon"] if "asked" in census else None
    parts = [CONTENT.get(census["task"], "rows"), hidden, *([f"noise of epsilon {noise:g}"] if noise else [])]
    return " · ".join(parts)


def _counts(census: Census) -> list[tuple[str, str]]:
    pooled, labels = census["pooled"], census["distances"]["labels"].values()
    found = [(str(len(census["sites"])), "sites that answered")]
    for key in ("rows", "people"):
        if pooled[key] is not None:
            found.append((f"{pooled[key]:,}", key))
    classes = pooled["tables"].get("classes")
    if classes is not None:
        hidden = [name for name in classes["hidden"] if name != NONE]
        named = [name for name, count in classes["people"].items() if count and name != NONE]
        found.append((str(len(named) + len(hidden)), "classes"))
    if labels:
        found.append((f"{sum(labels) / len(labels):.0%}", "labels apart, on average"))
    if census["alpha"] is not None:
        found.append((f"{census['alpha']:g}", "Dirichlet alpha that looks like this"))
    return found


def _by_site(census: Census) -> Table:
    head = ["site", "rows", "people", "repeated rows", "without a label", "language", "channels"]
    body = []
    for site, found in census["sites"].items():
        tables = found["tables"]
        body.append(
            [
                site,
                _number(found["rows"]),
                _number(found["people"]),
                _share(tables.get("repeated"), "repeated"),
                _share(tables.get("missing/label"), "missing", "empty"),
                _most_frequent(tables.get("language")),
                _most_frequent(tables.get("channels")),
            ]
        )
    kept = [column for column in range(len(head)) if column == 0 or any(line[column] for line in body)]
    return Table([head[c] for c in kept], [[line[c] for c in kept] for line in body])


def _number(value: float | None) -> str:
    return "too few" if value is None else f"{value:,g}"


def _share(found: Mapping[str, Any] | None, *names: str) -> str:
    if found is None:
        return ""
    if any(name in found["hidden"] for name in names):
        return "few"
    return f"{sum(found['rows'].get(name, 0) for name in names) / max(found['total'], 1):.1%}"


def _most_frequent(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = {name: count for name, count in found["rows"].items() if name != NONE and count}
    if not rows:
        return ""
    best = max(rows, key=lambda name: rows[name])
    return f"{best} ({rows[best] / max(found['total'], 1):.0%})"


Distances = dict[tuple[str, ...], Distance]  # by pair of sites


def _distances(census: Census) -> tuple[Distances, Distances]:
    """Distances of the labels, and of the values that differ most."""
    labels = {_pair(pair): Distance(share) for pair, share in census["distances"]["labels"].items()}
    features = {}
    for pair, found in census["distances"]["features"].items():
        name, share = max(found.items(), key=lambda item: item[1])
        features[_pair(pair)] = Distance(share, value_title(name))
    return labels, features


def _pair(names: str) -> tuple[str, ...]:
    return tuple(names.split(" | "))


def _moments(census: Census) -> list[list[str]]:
    body = []
    for name in census["pooled"]["moments"]:
        rows = [(site, found["moments"].get(name)) for site, found in census["sites"].items()]
        for site, found in [*rows, ("all together", census["pooled"]["moments"][name])]:
            if found is not None:
                count = "" if found["rows"] is None else f"{found['rows']:,}"
                spread = f"{math.sqrt(max(found['variance'], 0)):,.4g}"
                body.append([value_title(name), site, count, f"{found['mean']:,.4g}", spread, ""])
        quantiles = census["pooled"]["quantiles"].get(name)
        if body and quantiles and census["pooled"]["moments"][name] is not None:
            body[-1][-1] = " / ".join(f"{found['value']:,.3g}" for found in quantiles.values())
    return body


def _missing(census: Census) -> Table:
    """For each field, the share of a site's rows in each state."""
    states = ("present", "missing", "empty", "unreadable")
    body = []
    for name in census["pooled"]["tables"]:
        if not name.startswith("missing/"):
            continue
        for site, found in census["sites"].items():
            if (table := found["tables"].get(name)) is not None:
                known = (*table["rows"], *table["hidden"])
                cells = [_share(table, state) if state in known else "" for state in states]
                body.append([name.partition("/")[2], site, *cells])
    return Table(["field", "site", *states], body)


def _words(census: Census) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Columns of words, languages, scripts: the share of each word, as (label, head, body)."""
    parts: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []
    for name, pooled in census["pooled"]["tables"].items():
        plain = name in ("language", "script", "misread", "channels") or name.startswith("words/")
        if not plain or pooled is None:
            continue
        order = [word for word, count in pooled["rows"].items() if count] + pooled["hidden"]
        body = [
            [site, *(_share(found["tables"][name], word) for word in order)]
            for site, found in census["sites"].items()
            if found["tables"].get(name) is not None
        ]
        if order and body:
            title = name.replace("words/", "Column ")
            if name == "misread":
                title = "Texts read in the wrong encoding"
            parts.append((title.capitalize(), ["site", *order], body))
    return parts


def _rules(census: Census) -> list[tuple[str, str]]:
    asked = census.get("asked", {})
    return [
        ("census", asked.get("hash", "")),
        ("columns", ", ".join(asked.get("columns", {})) or "none beside content and label"),
        ("noise", f"epsilon {asked['epsilon']:g} for each person" if asked.get("epsilon") else "none"),
        ("floors", ", ".join(f"{site} {found['floor']}" for site, found in census["sites"].items())),
        ("unit", ", ".join(f"{site}: {found['unit']}" for site, found in census["sites"].items())),
    ]
