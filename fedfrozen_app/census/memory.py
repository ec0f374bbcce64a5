"""What a site has told before: two censuses must not tell more than each of them alone.

    VAR/census/VIEW.json   for each table and mean: who was in which cell, by keyed hash, and what was told

Asked again about the same rows, the site tells the same; and also where rows of fewer people than the floor
have changed since it last told anything new. Where more have, a table is told anew only if in everything that
it told nobody has changed, or as many people as the floor asks for; and only with the same cells hidden or
joined as before. Hidden cells count as one, and so do joined ones: if each of them had a say, that a table
is told anew would tell of it. A cell that was hidden stays hidden: shown later, it could be taken from an
earlier total. Otherwise the earlier table is told again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfrozen_app.census import floors
from fedfrozen_app.census.cells import Moments, Table
from fedfrozen_app.census.measure import Figures
from fedfrozen_app.census.records import Records
from fedfrozen_app.errors import UserError
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.seal import DAMAGED, sealed, unsealed

NOTHING: Mapping[str, Any] = {"told": None}
HIDDEN = "\0hidden"  # no class has such a name
Members = dict[str, dict[str, float]]  # person: cell: weight


def told(figures: Figures, records: Records, floor: int, before: dict[str, Any]) -> dict[str, Any]:
    """What leaves of every table and mean, and what must be remembered of it: `before` with the next state.

    `before` is changed: {"key", "floor", "tables", "moments"}.
    """
    if before.get("floor", floor) != floor:
        # Another floor is another way of hiding: what was told under the old one stays all that is told.
        floor = max(floor, int(before["floor"]))
    before["floor"] = floor
    key = before.setdefault("key", secrets.token_hex(32))
    names = [who(name, key) for name in records.names]
    tables, means = before.setdefault("tables", {}), before.setdefault("moments", {})
    everybody = digests(figures, names)
    if "everybody" not in before or changed_people(before["everybody"], everybody) >= floor:
        before["everybody"] = everybody
        for table in figures.tables:
            tables[table.name] = table_again(table, names, floor, tables.get(table.name))
        for found in figures.moments:
            means[found.name] = moments_again(found, names, floor, means.get(found.name))
    return {
        "tables": {table.name: tables.get(table.name, NOTHING)["told"] for table in figures.tables},
        "moments": {found.name: means.get(found.name, NOTHING)["told"] for found in figures.moments},
    }


def digests(figures: Figures, names: list[str]) -> dict[str, str]:
    """By person, of all that is counted of her."""
    parts: list[list[Any]] = [[] for _ in names]
    for table in figures.tables:
        for person, cells in table.members().items():
            parts[person].append((table.name, sorted(cells.items())))
    for found in figures.moments:
        for person, value in zip(found.person.tolist(), found.value.tolist(), strict=True):
            parts[person].append((found.name, value))
    return {
        name: hashlib.sha256(repr(own).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        for name, own in zip(names, parts, strict=True)
    }


def changed_people(before: Mapping[str, str], now: Mapping[str, str]) -> int:
    return sum(before.get(person) != now.get(person) for person in before.keys() | now.keys())


def who(name: str, key: str) -> str:
    return hmac.new(bytes.fromhex(key), name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
        :24
    ]


def first(table: Table, names: list[str], floor: int) -> dict[str, Any]:
    """A table that was never told, or of which nothing was."""
    groups = floors.joined_cells(table, floor) if table.everybody else None
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
    """The table as it may be told now, with its new state; or as it was told before, with the old one."""
    fresh = first(table, names, floor)
    if before is None or before["told"] is None:
        return fresh
    groups = [(low, high) for low, high in before["groups"] or ()]
    units = told_as_one(table, groups, [before["names"][cell] for cell in before["hidden"]])
    if not changed_enough(before["members"], fresh["members"], floor, units) or fresh["told"] is None:
        return dict(before)
    if before["groups"] is None:  # nobody was in it
        return fresh
    if before["names"] != fresh["names"] or not all(floors.sound(table, *part, floor) for part in groups):
        return dict(before)
    hidden = set(before["hidden"]) | floors.hidden_cells(table, groups)
    told = floors.joined(table, groups) if table.edges else floors.named(table, hidden)
    return fresh | {"groups": groups, "hidden": sorted(hidden), "told": told}


def told_as_one(table: Table, groups: floors.Groups, hidden: list[str]) -> dict[str, str]:
    """By cell, what it is told with, unless by itself: its interval as joined, or all that is hidden."""
    if not table.edges:
        return dict.fromkeys(hidden, HIDDEN)
    return {str(cell): f"from {low}" for low, high in groups for cell in range(low, high)}


def changed_enough(before: Members, now: Members, floor: int, units: Mapping[str, str]) -> bool:
    """Whether in everything that is told nobody changed, or `floor` people and more."""
    touched: dict[str, int] = {}
    people = 0
    for person in before.keys() | now.keys():
        old, new = (as_told(members.get(person, {}), units) for members in (before, now))
        cells = {cell for cell in old.keys() | new.keys() if old.get(cell) != new.get(cell)}
        people += bool(cells)
        for cell in cells:
            touched[cell] = touched.get(cell, 0) + 1
    return people >= floor and all(count >= floor for count in touched.values())


def as_told(cells: Mapping[str, float], units: Mapping[str, str]) -> dict[str, float]:
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


def rows_digest(records: Records) -> str:
    """Of all rows, whatever their order."""
    cells = [
        sorted((name, str(values[row])) for name, values in records.columns.items())
        for row in range(len(records))
    ]
    rows = sorted(
        repr((records.names[person], content, labels, own))
        for person, content, labels, own in zip(
            records.people.tolist(), records.contents, records.labels, cells, strict=True
        )
    )
    return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


# On the site's disk ---------------------------------------------------------------------------------------


def read_memory(path: Path) -> dict[str, Any]:
    """Empty where nothing was told; a damaged one ends the census, because it cannot be guessed."""
    if not path.exists():
        return {}
    try:
        return unsealed(path)
    except DAMAGED as error:
        raise UserError(
            f"{path}, the record of what censuses were told, is damaged: bring it back from a backup. "
            "Without it this site answers no census."
        ) from error


def write_memory(path: Path, memory: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, sealed(dict(memory)))
