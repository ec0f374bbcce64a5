"""A site's record of what it has released: two censuses must not reveal more together than each alone.

    VAR/census/VIEW.json   per table and mean: who was in which cell, by keyed hash, and what was released;
                           and each answer with noise, under the name of its charge

Asked again about the same rows, the site releases the same answer, and also if the rows of fewer than `floor`
people have changed since its last update. If more have, a table is updated only if in each released part
either no person changed or at least `floor` people did, and only with the same cells hidden or joined as
before. All hidden cells count as one part, and so do joined cells: if each counted by itself, the update
would reveal it. A hidden cell stays hidden: shown later, it could be subtracted from an earlier total.
Otherwise the earlier table is released again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.census import floors
from fedfrozen_app.census.cells import Moments, Table
from fedfrozen_app.census.measure import Measurements
from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.seal import sealed, unsealed

NOTHING: Mapping[str, Any] = {"told": None}
HIDDEN = "\0hidden"  # no class has such a name
Members = dict[str, dict[str, float]]  # person: cell: weight


def release(
    measured: Measurements, people: Sequence[str], floor: int, before: dict[str, Any]
) -> dict[str, Any]:
    """What leaves of every table and mean; updates `before` to the next state. `people` are the people's
    names, which stay here.

    `before` is changed: {"key", "floor", "tables", "moments"}.
    """
    if before.get("floor", floor) != floor:
        # Another floor hides other cells: only what was released under the old floor is released again.
        floor = max(floor, int(before["floor"]))
    before["floor"] = floor
    key = before.setdefault("key", secrets.token_hex(32))
    names = [who(name, key) for name in people]
    tables, means = before.setdefault("tables", {}), before.setdefault("moments", {})
    digests_now = digests(measured, names)
    if "everybody" not in before or changed_people(before["everybody"], digests_now) >= floor:
        before["everybody"] = digests_now
        for table in measured.tables:
            tables[table.name] = table_again(table, names, floor, tables.get(table.name))
        for found in measured.moments:
            means[found.name] = moments_again(found, names, floor, means.get(found.name))
    return {
        "tables": {table.name: tables.get(table.name, NOTHING)["told"] for table in measured.tables},
        "moments": {found.name: means.get(found.name, NOTHING)["told"] for found in measured.moments},
    }


def digests(measured: Measurements, names: list[str]) -> dict[str, str]:
    """By person, a digest of everything that is counted about them."""
    parts: list[list[Any]] = [[] for _ in names]
    for table in measured.tables:
        for person, cells in table.members().items():
            parts[person].append((table.name, sorted(cells.items())))
    for found in measured.moments:
        for person, value in zip(found.person.tolist(), found.value.tolist(), strict=True):
            parts[person].append((found.name, value))
    return {
        name: hashlib.sha256(repr(own).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        for name, own in zip(names, parts, strict=True)
    }


def changed_people(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    return sum(before.get(person) != now.get(person) for person in before.keys() | now.keys())


def who(name: str, key: str) -> str:
    return hmac.new(bytes.fromhex(key), name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
        :24
    ]


def first(table: Table, names: list[str], floor: int) -> dict[str, Any]:
    """The first release of a table."""
    groups = floors.joined_cells(table, floor) if table.total_people else None
    hidden = set() if table.edges or groups is None else floors.hidden_cells(table, groups)
    return {
        "members": {names[person]: cells for person, cells in table.members().items()},
        "names": list(table.names),
        "groups": groups,
        "hidden": sorted(hidden),
        "told": floors.publish(table, floor),
    }


def table_again(
    table: Table, names: list[str], floor: int, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The updated table with its new state if the update may leave; otherwise the earlier one with its
    state."""
    fresh = first(table, names, floor)
    if before is None or before["told"] is None:
        return fresh
    groups = [(low, high) for low, high in before["groups"] or ()]
    units = released_as_one(table, groups, [before["names"][cell] for cell in before["hidden"]])
    if not changed_enough(before["members"], fresh["members"], floor, units) or fresh["told"] is None:
        return dict(before)
    if before["groups"] is None:  # it was empty
        return fresh
    if before["names"] != fresh["names"] or not all(floors.sound(table, *part, floor) for part in groups):
        return dict(before)
    hidden = set(before["hidden"]) | floors.hidden_cells(table, groups)
    released = floors.joined(table, groups) if table.edges else floors.named(table, hidden)
    return fresh | {"groups": groups, "hidden": sorted(hidden), "told": released}


def released_as_one(table: Table, groups: floors.Groups, hidden: list[str]) -> dict[str, str]:
    """By cell, the unit that it is released in, unless by itself: its joined interval, or the hidden
    cells."""
    if not table.edges:
        return dict.fromkeys(hidden, HIDDEN)
    return {str(cell): f"from {low}" for low, high in groups for cell in range(low, high)}


def changed_enough(before: Members, now: Members, floor: int, units: Mapping[str, str]) -> bool:
    """Whether in each released part no person changed, or at least `floor` people did."""
    touched: dict[str, int] = {}
    people = 0
    for person in before.keys() | now.keys():
        old, new = (as_released(members.get(person, {}), units) for members in (before, now))
        cells = {cell for cell in old.keys() | new.keys() if old.get(cell) != new.get(cell)}
        people += bool(cells)
        for cell in cells:
            touched[cell] = touched.get(cell, 0) + 1
    return people >= floor and all(count >= floor for count in touched.values())


def as_released(cells: Mapping[str, float], units: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for cell, weight in cells.items():
        unit = units.get(cell, cell)
        found[unit] = found.get(unit, 0.0) + weight
    return found


def moments_again(
    found: Moments, names: list[str], floor: int, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for person, value in zip(found.person.tolist(), found.value.tolist(), strict=True):
        values.setdefault(names[person], []).append(value)
    own = {name: hashlib.sha256(json.dumps(some).encode()).hexdigest()[:24] for name, some in values.items()}
    fresh: dict[str, Any] = {"members": own, "told": floors.publish_moments(found, floor)}
    if before is None or before["told"] is None:
        return fresh
    changed = changed_people(before["members"], own)
    return fresh if changed >= floor and fresh["told"] is not None else dict(before)


# On the site's disk ---------------------------------------------------------------------------------------


def read_memory(path: Path) -> dict[str, Any]:
    """Read the record; empty if nothing was released. A damaged record ends the census."""
    if not path.exists():
        return {}
    try:
        return unsealed(path)
    except DAMAGED as error:
        raise UserError(
            f"{path}, the record of what was released to censuses, is damaged: bring it back from a backup. "
            "Without it this site answers no census."
        ) from error


def write_memory(path: Path, memory: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, sealed(dict(memory)))
