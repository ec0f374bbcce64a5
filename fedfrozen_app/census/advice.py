"""Advice from a census, in plain sentences: what may go wrong in a run, and what to do about it."""

from __future__ import annotations

import difflib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedfrozen_app.census.measure import NONE
from fedfrozen_app.core.formatting import counted

TINY = 0.1  # of the median site's rows
SHIFTED = 0.25  # total variation
SKEWED = 0.3
LACKING = 0.1  # share of people with a missing value, if twice as large as elsewhere
REPEATED = 0.05
NEAR = 0.84  # difflib's ratio from which two names may be spellings of one
MOST_NAMES = 4
Note = dict[str, str]
FEATURES = {
    "intensity": "the pictures' intensities",
    "brightness": "the pictures' brightness",
    "width": "the pictures' widths",
    "height": "the pictures' heights",
    "length": "the texts' lengths",
    "tokens": "the texts' tokens",
    "unknown": "the share of unknown tokens",
}


def advise(census: Mapping[str, Any]) -> list[Note]:
    """Notes by topic, the most important first; a single note if nothing stands out."""
    rules: tuple[Callable[[Mapping[str, Any]], Iterator[Note]], ...] = (
        _refused, _spelling, _absent, _tiny, _shifted, _skewed, _lacking, _texts, _repeated, _matches,
    )  # fmt: skip
    found = [note for rule in rules for note in rule(census)]
    return found or [_note("all", "", "Nothing stands out: the sites' data look alike in what was counted.")]


def _note(topic: str, site: str, text: str) -> Note:
    return {"topic": topic, "site": site, "text": text}


def _refused(census: Mapping[str, Any]) -> Iterator[Note]:
    for site, why in census["refused"].items():
        yield _note("refused", site, f"{site} reported nothing ({why}): the rest is about the others alone.")
    for site, found in census["sites"].items():
        if found["people"] is None:
            least = found["floor"]
            yield _note(
                "tiny", site, f"{site} has rows of fewer than {least} people, and reported nothing more."
            )


def _classes(census: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    tables = {site: found["tables"].get("classes") for site, found in census["sites"].items()}
    return {site: table for site, table in tables.items() if table is not None}


def _rows(table: Mapping[str, Any]) -> dict[str, float]:
    return {name: count for name, count in table["rows"].items() if name != NONE}


def plain_name(name: str) -> str:
    return re.sub(r"[^\w]+", " ", name.casefold().replace("_", " ")).strip()


def near(one: str, other: str) -> bool:
    """Whether two names may be two spellings of one; names with different numbers are not."""
    left, right = plain_name(one), plain_name(other)
    if left == right:
        return True
    if re.findall(r"\d+", left) != re.findall(r"\d+", right) or min(len(left), len(right)) < 4:
        return False
    return difflib.SequenceMatcher(None, left, right).ratio() >= NEAR


def spellings(census: Mapping[str, Any]) -> list[tuple[str, str, list[str], list[str]]]:
    """(one name, another, sites of the first, of the other): near-equal names that no site has both of."""
    held = {site: {name for name, count in _rows(t).items() if count} for site, t in _classes(census).items()}
    names = sorted(set().union(*held.values())) if held else []
    found = []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            first = [site for site, own in held.items() if one in own]
            second = [site for site, own in held.items() if other in own]
            if near(one, other) and not set(first) & set(second):
                found.append((one, other, first, second))
    return found


def _spelling(census: Mapping[str, Any]) -> Iterator[Note]:
    for one, other, first, second in spellings(census):
        text = (
            f"{_all(first)} {_verb(first, 'writes', 'write')} the class {one!r}, {_all(second)} {other!r}: "
            "if they mean the same, agree on one spelling before a run, or it trains two classes."
        )
        yield _note("spelling", second[0] if len(second) <= len(first) else first[0], text)


def _absent(census: Mapping[str, Any]) -> Iterator[Note]:
    tables = _classes(census)
    double = {name for one, other, _, _ in spellings(census) for name in (one, other)}
    names = dict.fromkeys(name for table in tables.values() for name, n in _rows(table).items() if n)
    for site, table in tables.items():
        hidden = set(table["hidden"])
        lacks = [
            name
            for name in names
            if name not in double and name not in hidden and not table["rows"].get(name)
            and not (table["others_hidden"] and name not in table["rows"])
        ]  # fmt: skip
        if lacks:
            text = (
                f"{site} has no class {_some(lacks)}: a personal head (strategy=fedper), or class weights "
                "(client.class_weights=true); evaluate it on its own rows (personal=true)."
            )
            yield _note("missing class", site, text)
        few = [name for name in hidden if name != NONE]
        if few:
            text = (
                f"{site} does not report its rows of the classes {_some(sorted(few))}: some are too rare "
                "there to be shown, and maybe to learn from; class weights help (client.class_weights=true)."
            )
            yield _note("rare class", site, text)


def _tiny(census: Mapping[str, Any]) -> Iterator[Note]:
    rows = {site: found["rows"] for site, found in census["sites"].items() if found["rows"] is not None}
    if len(rows) < 2:
        return
    middle = statistics.median(rows.values())
    for site, count in rows.items():
        if count < TINY * middle:
            text = (
                f"{site} has {counted(count, 'row')}, the median site {middle:,.0f}: it hardly moves the "
                "mean. Look at it by itself (personal=true), and ask whether its min_examples lets it in."
            )
            yield _note("tiny site", site, text)


def _shifted(census: Mapping[str, Any]) -> Iterator[Note]:
    """A site that is far from most others, in one feature or more."""
    sites = list(census["sites"])
    for site in sites:
        apart: dict[str, list[float]] = {}
        for pair, by_feature in census["distances"]["features"].items():
            if site in pair.split(" | "):
                for name, value in by_feature.items():
                    apart.setdefault(name, []).append(value)
        far = {name: statistics.median(v) for name, v in apart.items() if statistics.median(v) >= SHIFTED}
        others = [
            statistics.median(values)
            for name in far
            if (values := _among_others(census, site, name))
        ]  # fmt: skip
        if not far or (others and len(sites) > 2 and max(others) >= max(far.values())):
            continue
        names = sorted(far, key=lambda name: -far[name])
        what = _some([FEATURES.get(name, name.replace("numbers/", "the column ")) for name in names])
        text = f"{site} differs in {what}: {far[names[0]]:.0%} of its rows lie elsewhere than the others' do."
        if {"intensity", "brightness"} & far.keys():
            levels = _levels(census, site)
            text += f"{levels} Bring all to one window or normalise at the site, before labels are blamed."
        elif {"length", "tokens", "unknown"} & far.keys():
            text += " Ask what its texts are: other documents, templates, or another cut."
        else:
            text += " Ask whether it is measured alike there: unit, device, coding."
        yield _note("shift", site, text)


def _among_others(census: Mapping[str, Any], site: str, name: str) -> list[float]:
    pairs = census["distances"]["features"].items()
    return [found[name] for pair, found in pairs if site not in pair.split(" | ") and name in found]


def _levels(census: Mapping[str, Any], site: str) -> str:
    means = {
        name: moments["mean"]
        for name, found in census["sites"].items()
        if (moments := found["moments"].get("brightness")) is not None
    }
    others = [mean for name, mean in means.items() if name != site]
    if site not in means or not others:
        return ""
    usual = statistics.median(others)
    word = "brighter" if means[site] > usual else "darker"
    return f" Its pictures are {word}: {means[site]:.0f} of 255 on average, elsewhere {usual:.0f}."


def _skewed(census: Mapping[str, Any]) -> Iterator[Note]:
    apart = census["distances"]["labels"].values()
    if apart and statistics.mean(apart) >= SKEWED and census["alpha"] is not None:
        text = (
            f"The label mixes are far apart ({statistics.mean(apart):.0%} on average): rehearse with "
            "partition=like partition.census=census.json, or partition=dirichlet "
            f"partition.alpha={census['alpha']:g}; try fewer local epochs, or a method against drift "
            "(strategy=fedprox, scaffold)."
        )
        yield _note("label skew", "", text)


def share_of(table: Mapping[str, Any] | None, *names: str) -> float | None:
    """The share of these cells in a table's rows; None if one of them is hidden."""
    if table is None or not table["total"] or any(name in table["hidden"] for name in names):
        return None
    return sum(table["rows"].get(name, 0) for name in names) / table["total"]


def _lacking(census: Mapping[str, Any]) -> Iterator[Note]:
    names = [name for name in census["pooled"]["tables"] if name.startswith("missing/")]
    for name in names:
        shares = {
            site: share
            for site, found in census["sites"].items()
            if (share := share_of(found["tables"].get(name), "missing", "empty")) is not None
        }
        for site, share in shares.items():
            others = [value for other, value in shares.items() if other != site]
            if share >= LACKING and (not others or share >= 2 * statistics.median(others)):
                what = name.partition("/")[2]
                yield _note(
                    "missing values", site, f"{site} lacks {what} in {share:.0%} of its rows: ask why, and "
                    "whether these rows train."
                )  # fmt: skip


def _texts(census: Mapping[str, Any]) -> Iterator[Note]:
    top: dict[str, str] = {}
    for site, found in census["sites"].items():
        table = found["tables"].get("language")
        if table is not None and (rows := _rows(table)):
            best = max(rows, key=lambda name: rows[name])
            if best != "unsure" and rows[best]:
                top[site] = best
        unknown = found["moments"].get("unknown")
        if unknown is not None and unknown["mean"] >= 0.05:
            text = (
                f"{unknown['mean']:.0%} of the tokens of {site} are unknown to the model: take one with "
                "another vocabulary, or look at how the texts are encoded."
            )
            yield _note("unknown tokens", site, text)
        misread = share_of(found["tables"].get("misread"), "yes")
        if misread is not None and misread >= 0.01:
            text = (
                f"{misread:.0%} of the texts of {site} were read in the wrong encoding: save them as UTF-8."
            )
            yield _note("encoding", site, text)
    if len(set(top.values())) > 1:
        usual = statistics.mode(top.values())
        for site, name in top.items():
            if name != usual:
                text = (
                    f"{site} writes {name}, most others {usual}: a model of many languages, or a personal "
                    "one."
                )
                yield _note("language", site, text)


def _repeated(census: Mapping[str, Any]) -> Iterator[Note]:
    for site, found in census["sites"].items():
        share = share_of(found["tables"].get("repeated"), "repeated")
        if share is not None and share >= REPEATED:
            text = (
                f"{share:.0%} of the rows of {site} hold what another row of it holds: remove copies first."
            )
            yield _note("duplicates", site, text)


def _matches(census: Mapping[str, Any]) -> Iterator[Note]:
    for pair, count in (census["matches"] or {}).items():
        if count:
            one, other = pair.split(" | ")
            text = f"{one} and {other} share {count} rows: a test row of one may be a train row of the other."
            yield _note("shared rows", one, text)


def _all(sites: list[str]) -> str:
    return sites[0] if len(sites) == 1 else ", ".join(sites[:-1]) + " and " + sites[-1]


def _verb(sites: list[str], one: str, many: str) -> str:
    return one if len(sites) == 1 else many


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"
