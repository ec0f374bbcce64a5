"""Answers a census; shared by simulations in one process, Flower clients and real sites."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.measure import Tokens, is_edges, measure
from fedfrozen_app.census.memory import release
from fedfrozen_app.census.noised import release_with_noise
from fedfrozen_app.census.records import Records
from fedfrozen_app.census.rules import Rules

FORMAT = 1


def problem(ask: Ask, rules: Rules) -> str | None:
    """Why these columns are not counted; completes a sentence."""
    for name, kinds in ask.columns.items():
        if name not in rules.columns:
            return f"the census asks for the column {name}, which the policy does not name"
        if tuple(kinds) != tuple(rules.columns[name]):
            what = "edges" if is_edges(kinds) else "words"
            return f"the census counts the column {name} by other {what} than the policy's"
    if ask.matches and rules.key is None:
        return "the census asks for hashes of rows, which do not leave it"
    return None


def released_counts(
    ask: Ask, records: Records, rules: Rules, memory: dict[str, Any], tokens: Tokens | None = None
) -> dict[str, Any]:
    """The counts that leave. Everything that may be counted is counted and recorded in `memory`; the ask only
    selects from it, so that comparing two asks reveals nothing more."""
    measured = measure(records, rules.columns, tokens)
    found: dict[str, Any] = {
        "format": FORMAT,
        "task": records.task,
        "unit": "example" if records.unit == "example" else "person",
        "floor": rules.floor,
        "epsilon": ask.epsilon,
    }
    if ask.epsilon is not None:
        found |= release_with_noise(measured, ask.epsilon)
    elif measured.people < rules.floor and "tables" not in memory:
        return found | {"people": None, "rows": None, "tables": {}, "moments": {}}
    else:
        found |= release(measured, records.names, rules.floor, memory)
    total = found["tables"]["total"]
    found["people"] = None if total is None else total["people"]["all"]
    found["rows"] = None if total is None else total["rows"]["all"]
    for part in ("tables", "moments"):
        found[part] = {name: value for name, value in found[part].items() if _asked(name, ask)}
    if ask.matches and rules.key is not None:
        found["hashes"] = keyed(records, rules.key)
    return found


def _asked(name: str, ask: Ask) -> bool:
    _, slash, column = name.partition("/")
    return name != "total" and (not slash or column in ask.columns or column in ("content", "label"))


def keyed(records: Records, key: bytes) -> list[str]:
    """Keyed hashes of all distinct contents, sorted: without the key a hash reveals nothing about its row."""
    made = {
        hmac.new(key, digest.encode(), hashlib.sha256).hexdigest()[:32]
        for digest in records.contents
        if digest
    }
    return sorted(made)
