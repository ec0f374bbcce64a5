"""A server's census request to a site: JSON with a closed schema, like a run's proposal.

It names a view and columns, with the edges or levels by which these are counted, and nothing else. A site
checks all of it against its policy: edges and levels that differ from the policy's are refused, because a
server that chooses edges can isolate one person in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import NAME, RUN_ID
from fedfrozen_app.exchange.strict import Spelled, read_json

FORMAT = 1
KIND = "census"
MOST, DEPTH, LONGEST = 100_000, 4, 200
MOST_COLUMNS, MOST_CELLS = 100, 1000
KEYS = {"format", "kind", "id", "view", "columns", "epsilon", "floor", "matches"}


@dataclass(frozen=True)
class Ask(Spelled):
    id: str
    view: str | None = None
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # edges, or words
    epsilon: float | None = None  # of the noise on every count; None: exact counts
    floor: int = 10  # for simulated clients; a site uses its policy's
    matches: bool = False  # rows that sites share, by keyed hashes, which are exact: never with an epsilon

    @cached_property
    def plain(self) -> dict[str, Any]:
        columns = {name: list(kinds) for name, kinds in self.columns.items()}
        return {"format": FORMAT, "kind": KIND, **vars_of(self), "columns": columns}


def vars_of(ask: Ask) -> dict[str, Any]:
    return {key: getattr(ask, key) for key in ("id", "view", "epsilon", "floor", "matches")}


def read_ask(text: str) -> Ask:
    """Parse a request; if it is malformed, a `ValueError` that completes a sentence in the site's own log."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    if not isinstance(found, dict) or set(found) != KEYS:
        raise ValueError("it has other keys than a census")
    if type(found["format"]) is not int or found["format"] != FORMAT or found["kind"] != KIND:
        raise ValueError("it is of another version's format")
    if not isinstance(found["id"], str) or not RUN_ID.fullmatch(found["id"]):
        raise ValueError("id is none: small letters, digits and - make one")
    view = found["view"]
    if view is not None and not (isinstance(view, str) and NAME.fullmatch(view)):
        raise ValueError("view is no name of a view")
    epsilon = found["epsilon"]
    if epsilon is not None and not (type(epsilon) in (int, float) and 0 < epsilon <= 1000):
        raise ValueError("epsilon is out of bounds")
    if type(found["floor"]) is not int or not 1 <= found["floor"] <= 10_000:
        raise ValueError("floor is out of bounds")
    if type(found["matches"]) is not bool:
        raise ValueError("matches is neither true nor false")
    if found["matches"] and epsilon is not None:
        raise ValueError("noise (epsilon) hides no hash of a row (matches): ask for one of the two")
    if not isinstance(found["columns"], dict) or len(found["columns"]) > MOST_COLUMNS:
        raise ValueError("columns are none")
    columns = {name: checked_column(name, kinds) for name, kinds in found["columns"].items()}
    return Ask(found["id"], view, columns, epsilon, found["floor"], found["matches"])


def checked_column(name: Any, kinds: Any) -> tuple[Any, ...]:
    """Increasing edges or distinct levels; `ValueError` for anything else."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST:
        raise ValueError("columns has a name that is none")
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MOST_CELLS:
        raise ValueError(f"the column {name} has no list of edges or words")
    if all(isinstance(kind, str) and kind.strip() and kind.isprintable() for kind in kinds):
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"the words of the column {name} are not distinct")
        return tuple(kinds)
    if not all(type(kind) in (int, float) and math.isfinite(kind) for kind in kinds):
        raise ValueError(f"the column {name} has neither edges nor words")
    if len(kinds) < 2 or any(low >= high for low, high in pairwise(kinds)):
        raise ValueError(f"the edges of the column {name} do not rise")
    return tuple(float(kind) for kind in kinds)


def column_words(words: list[str]) -> dict[str, tuple[Any, ...]]:
    """`age=0,18,65,120 sex=F,M`, as people write it."""
    found: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, _, rest = word.partition("=")
        items = [item.strip() for item in rest.split(",") if item.strip()]
        try:
            kinds: list[Any] = [float(item) for item in items]
        except ValueError:
            kinds = list(items)
        try:
            found[name] = checked_column(name, kinds)
        except ValueError as error:
            raise UserError(
                f"--column {word}: {error}. Write age=0,18,65,120 for numbers (the edges), sex=F,M for words."
            ) from error
    return found
