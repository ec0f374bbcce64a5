"""An answer that came over the wire: what it may hold, before the server adds it up."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from fedfrozen_app.census.site import FORMAT
from fedfrozen_app.exchange.strict import read_json

MOST, DEPTH, LONGEST = 50_000_000, 6, 1000
KEYS = {"format", "task", "unit", "floor", "epsilon", "people", "rows", "tables", "moments"}
TASKS = ("image", "text", "multilabel", "tokens", "language")
MOST_CELLS = 20_000


def read_answer(text: str) -> dict[str, Any]:
    """`ValueError` with a reason where it is none."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    if not isinstance(found, dict) or not KEYS <= set(found) <= KEYS | {"hashes"}:
        raise ValueError("has other keys than an answer to a census")
    if found["format"] != FORMAT or found["task"] not in TASKS or found["unit"] not in ("example", "person"):
        raise ValueError("is of another version")
    if not _whole(found["floor"]) or not (found["epsilon"] is None or _number(found["epsilon"])):
        raise ValueError("does not say its floor")
    if not all(found[key] is None or _whole(found[key]) for key in ("people", "rows")):
        raise ValueError("does not say how many rows there are")
    for part, sound in (("tables", _table), ("moments", _moments)):
        if not isinstance(found[part], dict):
            raise ValueError(f"has no {part}")
        for name, value in found[part].items():
            if not (value is None or sound(value)):
                raise ValueError(f"has no sound {name}")
    hashes = found.get("hashes", [])
    if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
        raise ValueError("has hashes that are none")
    return found


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _table(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if set(value) == {"edges", "people", "rows", "none"}:
        edges, people, rows = (value[key] for key in ("edges", "people", "rows"))
        if not all(isinstance(part, list) for part in (edges, people, rows)):
            return False
        if not 2 <= len(edges) <= MOST_CELLS or {len(people), len(rows)} != {len(edges) - 1}:
            return False
        none = value["none"]
        apart = none is None or (isinstance(none, dict) and set(none) == {"people", "rows"})
        numbers = [*edges, *people, *rows, *(none.values() if isinstance(none, dict) else ())]
        rising = all(map(_number, edges)) and all(a < b for a, b in pairwise(edges))
        return apart and rising and all(map(_number, numbers)) and min([*people, *rows]) >= 0
    if set(value) != {"total", "people", "rows", "hidden", "others_hidden"}:
        return False
    people, rows = value["people"], value["rows"]
    if not isinstance(people, dict) or not isinstance(rows, dict) or set(people) != set(rows):
        return False
    words = isinstance(value["hidden"], list) and all(isinstance(name, str) for name in value["hidden"])
    numbers = [value["total"], *people.values(), *rows.values()]
    counts = len(people) <= MOST_CELLS and all(_number(number) and number >= 0 for number in numbers)
    return words and counts and type(value["others_hidden"]) is bool


def _moments(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"rows", "people", "mean", "variance"}:
        return False
    counts = all(value[key] is None or _whole(value[key]) for key in ("rows", "people"))
    return counts and _number(value["mean"]) and _number(value["variance"]) and value["rows"] != 0
