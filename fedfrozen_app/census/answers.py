"""Validates a site's answer before the server adds it up."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from fedfrozen_app.census.site import FORMAT
from fedfrozen_app.core import registry
from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.exchange.strict import read_json

MOST, DEPTH, LONGEST = 50_000_000, 6, 1000
KEYS = {"format", "task", "unit", "floor", "epsilon", "people", "rows", "tables", "moments"}
MOST_CELLS, MOST_TABLES = 20_000, 2000
MOST_COUNT = 2**53  # a larger one is no whole number in a float
LARGEST = 1e30  # of a value, so that its square times a count cannot overflow a float
SHOWN = 60  # characters of a name in a sentence


def read_answer(text: str) -> dict[str, Any]:
    """Parse an answer; `ValueError` with a reason if it is malformed."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    if not isinstance(found, dict) or not KEYS <= set(found) <= KEYS | {"hashes"}:
        raise ValueError("has other keys than an answer to a census")
    tasks = registry.names("tasks")
    if found["format"] != FORMAT or found["task"] not in tasks or found["unit"] not in ("example", "person"):
        raise ValueError("is of another version")
    epsilon = found["epsilon"]
    if not _whole(found["floor"]) or not (epsilon is None or (_number(epsilon) and epsilon > 0)):
        raise ValueError("does not say its floor")
    if not all(found[key] is None or _whole(found[key]) for key in ("people", "rows")):
        raise ValueError("does not say how many rows there are")
    for part, sound in (("tables", _table), ("moments", _moments)):
        if not isinstance(found[part], dict) or len(found[part]) > MOST_TABLES:
            raise ValueError(f"has no {part}")
        for name, value in found[part].items():
            if not name.isprintable() or not (value is None or sound(value)):
                raise ValueError(f"has no sound {quoted(name, SHOWN)}")
    hashes = found.get("hashes", [])
    if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
        raise ValueError("has hashes that are none")
    return found


def problem_beside(found: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why this answer cannot be merged with those accepted before; the text completes a sentence."""
    for name, table in found["tables"].items():
        known = [one for other in others.values() if (one := other["tables"].get(name)) is not None]
        if table is None or not known:
            continue
        kinds = {"edges" in one for one in (table, *known)}
        shared = set.intersection(*(set(one.get("edges", ())) for one in (table, *known)))
        if len(kinds) > 1 or (kinds == {True} and len(shared) < 2):
            return f"counts {quoted(name, SHOWN)} in another way than the other sites"
    return None


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNT


def _count(value: Any) -> bool:
    """A count of rows may be a fraction: a row with two labels is half a row of each."""
    return type(value) in (int, float) and 0 <= value <= MOST_COUNT


def _table(value: Any) -> bool:
    return isinstance(value, dict) and (_intervals(value) if "edges" in value else _categories(value))


def _intervals(value: dict[str, Any]) -> bool:
    if set(value) != {"edges", "people", "rows", "none"}:
        return False
    edges, people, rows, none = (value[key] for key in ("edges", "people", "rows", "none"))
    if not all(isinstance(part, list) for part in (edges, people, rows)):
        return False
    if not 2 <= len(edges) <= MOST_CELLS or {len(people), len(rows)} != {len(edges) - 1}:
        return False
    if none is not None and not (isinstance(none, dict) and set(none) == {"people", "rows"}):
        return False
    counts = [*people, *rows, *(none.values() if none is not None else ())]
    return all(map(_number, edges)) and all(a < b for a, b in pairwise(edges)) and all(map(_count, counts))


def _categories(value: dict[str, Any]) -> bool:
    if set(value) != {"total", "people", "rows", "hidden", "others_hidden"}:
        return False
    people, rows, hidden = value["people"], value["rows"], value["hidden"]
    if not (isinstance(people, dict) and isinstance(rows, dict) and isinstance(hidden, list)):
        return False
    if set(people) != set(rows) or not all(isinstance(name, str) for name in hidden):
        return False
    names = [*people, *hidden]
    if len(set(names)) < len(names) or len(names) > MOST_CELLS:
        return False
    if not all(map(str.isprintable, names)) or not all(
        map(_count, (value["total"], *people.values(), *rows.values()))
    ):
        return False
    apart = sum(rows.values()) - value["total"]  # the hidden cells have the rest
    return apart <= 1e-6 * (1 + value["total"]) and type(value["others_hidden"]) is bool


def _moments(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"rows", "people", "mean", "variance"}:
        return False
    if value["rows"] is None:
        counts = value["people"] is None or _whole(value["people"])
    else:
        counts = _whole(value["rows"]) and value["rows"] > 0 and _whole(value["people"])
    return counts and _number(value["mean"]) and _number(value["variance"]) and value["variance"] >= 0
