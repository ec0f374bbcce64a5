"""census.html: whether the sites' data fit together, on one page that needs nothing else."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedfrozen_app.report.html import box, cards, document, figures, fold, pairs, raw_table, save, table
from fedfrozen_app.words import counted

Census = Mapping[str, Any]
NONE = "(none)"
COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "wine", "olive", "indigo", "yellow")
STROKES = ("", "dashed", "dotted")
TITLES = {
    "length": ("Characters of a text", "characters"),
    "tokens": ("Tokens of a text", "tokens"),
    "unknown": ("Unknown tokens of a text", "share"),
    "width": ("Width of the pictures", "pixels"),
    "height": ("Height of the pictures", "pixels"),
    "intensity": ("Intensity of the pixels", "level"),
    "brightness": ("Mean intensity of a picture", "level"),
}
MOST_CLASSES = 60
CELL, LEFT, TOP, RIGHT = 46, 150, 96, 76  # of the heat map, in pixels


def write_page(census: Census, folder: Path) -> None:
    save(page(census), folder / "census.html")


def page(census: Census) -> str:
    sites = census["sites"]
    charts = [_histogram(name, sites) for name in census["pooled"]["tables"] if _ordered(name, sites)]
    header = f"""<h1>Census of {counted(len(sites), "site")}</h1>
<p class="soft">{escape(_what(census))}</p>
{_refused(census)}
{cards(_cards(census))}"""
    main = f"""<h2>Advice</h2>
{_advice(census)}
<h2>Who has what</h2>
{_classes(census)}
{box(_site_table(census))}
<h2>How far apart</h2>
{_distances(census)}
<h2>Values</h2>
{figures(charts)}
{_moments(census)}
<h2>What is missing</h2>
{_words(census, "missing/", ("present", "missing", "empty", "unreadable"))}
{_other_words(census)}
<h2>How it was counted</h2>
{_rules(census)}"""
    return document("Census", header, main, charts)


def _ordered(name: str, sites: Mapping[str, Any]) -> bool:
    """Whether it is a histogram, and one that shows something: not all rows of all sites in one interval."""
    told = [table for found in sites.values() if (table := found["tables"].get(name)) is not None]
    if not told or "edges" not in told[0]:
        return False
    filled = {(low, high) for table in told for low, high, count in _intervals(table) if count}
    return len(filled) > 1


def _intervals(table: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    edges = table["edges"]
    return list(zip(edges, edges[1:], table["rows"], strict=False))


def _what(census: Census) -> str:
    task = {
        "image": "pictures",
        "text": "texts",
        "multilabel": "texts with several labels",
        "tokens": "words",
        "language": "prompts and answers",
    }
    floors = sorted({found["floor"] for found in census["sites"].values()})
    said = f"cells of fewer than {' or '.join(map(str, floors))} people are not told"
    noise = census["asked"]["epsilon"] if "asked" in census else None
    return f"{task.get(census['task'], 'rows')} · {said}" + (
        f" · noise of epsilon {noise:g}" if noise else ""
    )


def _refused(census: Census) -> str:
    return "".join(
        f'<p class="warn">{escape(site)} told nothing: {escape(why)}.</p>'
        for site, why in census["refused"].items()
    )


def _cards(census: Census) -> list[tuple[str, str]]:
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


def _advice(census: Census) -> str:
    rows = [
        [f"<b>{escape(note['topic'])}</b>", f'<span class="wrap">{escape(note["text"])}</span>']
        for note in census["advice"]
    ]
    lines = "".join(f"<tr><th>{topic}</th><td>{text}</td></tr>" for topic, text in rows)
    return f'<div class="box"><table class="pairs short">{lines}</table></div>'


# Who has what ---------------------------------------------------------------------------------------------


def _classes(census: Census) -> str:
    tables = {site: found["tables"].get("classes") for site, found in census["sites"].items()}
    told = {site: table for site, table in tables.items() if table is not None}
    names = list(
        dict.fromkeys(name for table in told.values() for name in (*table["rows"], *table["hidden"]))
    )
    names = sorted(
        names,
        key=lambda name: (name == NONE, not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
    )
    names = [name for name in names if name != NONE or any(_count(t, NONE) != 0 for t in told.values())]
    if not told or not names:
        return '<p class="soft">No site told its classes.</p>'
    more = "" if len(names) <= MOST_CLASSES else f" The first {MOST_CLASSES} of {len(names)} classes."
    note = f"Rows of each class, darker for a larger share of the site's. ·: none; ?: too few to tell.{more}"
    drawn = heat_map(told, names[:MOST_CLASSES])
    return (
        f'<figure><figcaption>Classes by site</figcaption><p class="note">{note}</p>'
        f'<div class="scroll">{drawn}</div></figure>'
    )


def _count(table: Mapping[str, Any], name: str) -> float | None:
    """None where it is hidden."""
    if name in table["hidden"]:
        return None
    return table["rows"].get(name, None if table["others_hidden"] else 0)


def heat_map(tables: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """Sites below one another, classes side by side; drawn here, so that it needs no script."""
    width, height = LEFT + CELL * len(names) + RIGHT, TOP + CELL * len(tables) * 3 // 4 + 6
    row = CELL * 3 // 4
    parts = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    ]
    parts.append(f"<title>Rows of {len(names)} classes at {len(tables)} sites</title>")
    for column, name in enumerate(names):
        x = LEFT + CELL * column + CELL // 2
        label = f"{escape(_short(name, 15))}<title>{escape(name)}</title>"
        parts.append(f'<text x="{x}" y="{TOP - 8}" transform="rotate(-45 {x} {TOP - 8})">{label}</text>')
    for line, (site, told) in enumerate(tables.items()):
        y = TOP + row * line
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + row * 0.65:.0f}" text-anchor="end">'
            f"{escape(_short(site, 20))}</text>"
        )
        for column, name in enumerate(names):
            parts.append(_cell(told, site, name, LEFT + CELL * column, y, row))
    return "".join(parts) + "</svg>"


def _cell(table: Mapping[str, Any], site: str, name: str, x: int, y: int, row: int) -> str:
    count = _count(table, name)
    share = math.sqrt(count / table["total"]) if count and table["total"] else 0.0
    shown = "?" if count is None else "·" if not count else _brief(count)
    told = "too few to tell" if count is None else f"{count:,g} rows"
    strong = ' class="on"' if share > 0.6 else ""
    return (
        f"<g><title>{escape(f'{site}, {name}: {told}')}</title>"
        f'<rect class="cell" x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{row - 2}" '
        f'fill-opacity="{0.06 + 0.84 * share if count else 0.03:.2f}"/>'
        f'<text{strong} x="{x + CELL // 2}" y="{y + row * 0.65:.0f}" text-anchor="middle">{shown}</text></g>'
    )


def _brief(count: float) -> str:
    return f"{count:,g}" if count < 10_000 else f"{count / 1000:,.0f}k"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _site_table(census: Census) -> str:
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
                _most(tables.get("language")),
                _most(tables.get("channels")),
            ]
        )
    kept = [column for column in range(len(head)) if column == 0 or any(line[column] for line in body)]
    return table([head[c] for c in kept], [[line[c] for c in kept] for line in body])


def _number(value: float | None) -> str:
    return "too few" if value is None else f"{value:,g}"


def _share(found: Mapping[str, Any] | None, *names: str) -> str:
    if found is None:
        return ""
    if any(name in found["hidden"] for name in names):
        return "few"
    return f"{sum(found['rows'].get(name, 0) for name in names) / max(found['total'], 1):.1%}"


def _most(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = {name: count for name, count in found["rows"].items() if name != NONE and count}
    if not rows:
        return ""
    best = max(rows, key=lambda name: rows[name])
    return f"{best} ({rows[best] / max(found['total'], 1):.0%})"


# Distances ------------------------------------------------------------------------------------------------


def _distances(census: Census) -> str:
    sites = list(census["sites"])
    labels = census["distances"]["labels"]
    features = {
        pair: max(found.items(), key=lambda item: item[1])
        for pair, found in census["distances"]["features"].items()
    }
    parts = [
        '<p class="text">The share of one site\'s rows that would have to change to look like the '
        "other's: 0% alike, 100% nothing in common.</p>"
    ]
    if labels:
        cells = {pair: (value, f"{value:.0%}") for pair, value in labels.items()}
        parts.append("<p>Labels</p>" + box(_matrix(sites, cells)))
    if features:
        cells = {
            pair: (value, f"{value:.0%}<small>{escape(_title(name))}</small>")
            for pair, (name, value) in features.items()
        }
        parts.append("<p>Values, in what differs most</p>" + box(_matrix(sites, cells)))
    if census["matches"]:
        body = [[pair.replace(" | ", " and "), str(count)] for pair, count in census["matches"].items()]
        parts.append("<p>Rows that two sites share</p>" + box(table(["sites", "rows"], body)))
    return "".join(parts) if len(parts) > 1 else '<p class="soft">There is one site.</p>'


def _matrix(sites: Sequence[str], cells: Mapping[str, tuple[float, str]]) -> str:
    body = []
    for one in sites:
        line = [escape(one)]
        for other in sites:
            found = cells.get(f"{one} | {other}") or cells.get(f"{other} | {one}")
            if one == other or found is None:
                line.append("–" if one == other else "")
            else:
                strong = ' class="warn"' if found[0] >= 0.5 else ""
                line.append(f"<span{strong}>{found[1]}</span>")
        body.append(line)
    return raw_table(["", *sites], body)


def _title(name: str) -> str:
    return TITLES.get(name, (name.partition("/")[2] or name, ""))[0].lower()


# Values ---------------------------------------------------------------------------------------------------


def _histogram(name: str, sites: Mapping[str, Any]) -> dict[str, Any]:
    """Shares of a site's rows by interval, each drawn as wide as it is: steps."""
    title, label = TITLES.get(name, (name.partition("/")[2], "value"))
    series, ends = [], []
    for number, (site, found) in enumerate(sites.items()):
        told = found["tables"].get(name)
        if told is None or not sum(told["rows"]):
            continue
        total = sum(told["rows"])
        top = max(cell for cell, count in enumerate(told["rows"]) if count)
        points: list[tuple[float, float]] = []
        for cell, count in enumerate(told["rows"][: top + 1]):
            low, high = told["edges"][cell], told["edges"][cell + 1]
            if high > 1e5 and cell:  # open to the right: as wide as what it begins with
                high = 2 * low
            points += [(low, count / total), (high, count / total)]
            ends += [low, high]
        turn, colour = divmod(number, len(COLOURS))
        stroke = STROKES[turn % len(STROKES)]
        series.append(
            {
                "name": site,
                "colour": COLOURS[colour],
                "stroke": stroke,
                "points": [[x, round(y, 4)] for x, y in points],
            }
        )
    axis = {
        "label": label,
        "unit": "",
        "from": min(ends or [0]),
        "to": max(ends or [1]),
        "whole": False,
        "marks": [],
    }
    return {
        "title": title,
        "unit": "share of the site's rows",
        "kind": "path",
        "x": axis,
        "from_zero": True,
        "least": 0.0,
        "series": series,
        "steps": True,
        "note": "Where few people are, neighbouring intervals are joined." if series else "No site told it.",
    }


def _moments(census: Census) -> str:
    body = []
    for name in census["pooled"]["moments"]:
        rows = [(site, found["moments"].get(name)) for site, found in census["sites"].items()]
        for site, found in [*rows, ("all together", census["pooled"]["moments"][name])]:
            if found is not None:
                count = "" if found["rows"] is None else f"{found['rows']:,}"
                spread = f"{math.sqrt(max(found['variance'], 0)):,.4g}"
                body.append([_title(name), site, count, f"{found['mean']:,.4g}", spread, ""])
        quantiles = census["pooled"]["quantiles"].get(name)
        if body and quantiles and census["pooled"]["moments"][name] is not None:
            body[-1][-1] = " / ".join(f"{found['value']:,.3g}" for found in quantiles.values())
    if not body:
        return ""
    head = ["value", "site", "rows", "mean", "standard deviation", "5 / 25 / 50 / 75 / 95 %"]
    return fold("Means and quantiles (quantiles: within the intervals)", table(head, body, ruled=True))


def _words(census: Census, prefix: str, order: Sequence[str]) -> str:
    body = []
    for name in census["pooled"]["tables"]:
        if name.startswith(prefix):
            for site, found in census["sites"].items():
                told = found["tables"].get(name)
                if told is not None:
                    cells = [
                        _share(told, word) if word in (*told["rows"], *told["hidden"]) else ""
                        for word in order
                    ]
                    body.append([name.partition("/")[2], site, *cells])
    return box(table(["field", "site", *order], body, ruled=True)) if body else ""


def _other_words(census: Census) -> str:
    """Columns of words, languages, scripts: the share of each."""
    parts = []
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
            title = {"misread": "Texts read in the wrong encoding"}.get(
                name, name.replace("words/", "Column ")
            )
            parts.append(fold(title.capitalize(), table(["site", *order], body)))
    return "".join(parts)


def _rules(census: Census) -> str:
    asked = census.get("asked", {})
    said = [
        ("census", asked.get("hash", "")),
        ("columns", ", ".join(asked.get("columns", {})) or "none beside content and label"),
        ("noise", f"epsilon {asked['epsilon']:g} for each person" if asked.get("epsilon") else "none"),
        ("floors", ", ".join(f"{site} {found['floor']}" for site, found in census["sites"].items())),
        ("unit", ", ".join(f"{site}: {found['unit']}" for site, found in census["sites"].items())),
    ]
    return box(pairs(said, "pairs short"))
