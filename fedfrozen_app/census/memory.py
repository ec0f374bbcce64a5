"""What a site has told before: two censuses must not tell more than each of them alone.

    VAR/census/VIEW.json   for each table and mean: who was in which cell, by keyed hash, and what was told

Asked again about the same rows, the site tells the same. Where rows have changed, a table is told anew only
if in every cell of it nobody has changed, or as many people as the floor asks for; and only with the same
cells hidden or joined as before. A cell that was hidden stays hidden: shown later, it could be taken from an
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
    for table in figures.tables:
        tables[table.name] = table_again(table, names, floor, tables.get(table.name))
    for found in figures.moments:
        means[found.name] = moments_again(found, names, floor, means.get(found.name))
    return {
        "tables": {table.name: tables[table.name]["told"] for table in figures.tables},
        "moments": {found.name: means[found.name]["told"] for found in figures.moments},
    }


def who(name: str, key: str) -> str:
    return hmac.new(bytes.fromhex(key), name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
        :24
    ]


def first(table: Table, names: list[str], floor: int) -> dict[str, Any]:
    """A table that was never told, or of which nothing was."""
    members = {names[person]: cells for person, cells in table.members().items()}
    groups = floors.joined_cells(table, floor) if table.edges and table.everybody else None
    hidden = None if table.edges else floors.hidden_cells(table.people(), table.everybody, floor)
    return {
        "members": members,
        "told": floors.publish(table, floor),
        "groups": groups,
        "hidden": None if hidden is None else sorted(table.names[cell] for cell in hidden),
    }


def table_again(
    table: Table, names: list[str], floor: int, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The table as it may be told now, with its new state; or as it was told before, with the old one."""
    fresh = first(table, names, floor)
    if before is None or before["told"] is None:
        return fresh
    if before["members"] == fresh["members"]:
        return dict(before)
    if not changed_enough(before["members"], fresh["members"], floor) or fresh["told"] is None:
        return dict(before)
    if table.edges:
        if before["groups"] is None:  # nobody was in it
            return fresh
        groups = [(low, high) for low, high in before["groups"]]
        if not all(floors.sound(table, low, high, floor) for low, high in groups):
            return dict(before)
        return fresh | {"groups": groups, "told": floors.joined(table, groups)}
    kept = {cell for cell, name in enumerate(table.names) if name in before["hidden"]}
    needed = {cell for cell, name in enumerate(table.names) if name in fresh["hidden"]}
    if len(kept) < len(before["hidden"]) or not needed <= kept:
        return dict(before)
    if kept and not floors.enough(kept, table.people().tolist(), floor):
        return dict(before)
    return fresh | {"hidden": before["hidden"], "told": floors.named(table, kept)}


def changed_enough(before: Members, now: Members, floor: int) -> bool:
    """Whether in every cell nobody changed, or `floor` people and more."""
    touched: dict[str, int] = {}
    people = 0
    for person in before.keys() | now.keys():
        old, new = before.get(person, {}), now.get(person, {})
        cells = {cell for cell in old.keys() | new.keys() if old.get(cell) != new.get(cell)}
        people += bool(cells)
        for cell in cells:
            touched[cell] = touched.get(cell, 0) + 1
    return people >= floor and all(count >= floor for count in touched.values())


def moments_again(
    found: Moments, names: list[str], floor: int, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for person, value in zip(found.person.tolist(), found.value.tolist(), strict=True):
        values.setdefault(names[person], []).append(value)
    digests = {
        name: hashlib.sha256(json.dumps(own).encode()).hexdigest()[:24] for name, own in values.items()
    }
    fresh: dict[str, Any] = {"members": digests, "told": floors.publish_moments(found, floor)}
    if before is None or before["told"] is None:
        return fresh
    old = before["members"]
    changed = sum(old.get(name) != digests.get(name) for name in old.keys() | digests.keys())
    return fresh if changed >= floor and fresh["told"] is not None else dict(before)


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
