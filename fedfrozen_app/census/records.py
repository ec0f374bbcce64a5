"""A site's rows for a census: unprocessed, with the person of each row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.data.sources.labels import unit_numbers
from fedfrozen_app.data.sources.raw_rows import Rows
from fedfrozen_app.tasks.entity_tags import OUTSIDE
from fedfrozen_app.tasks.target import target_of

LABELLED = "labelled"


@dataclass(frozen=True)
class Records:
    task: str
    content: Sequence[Any]  # as read; None if missing
    labels: Sequence[tuple[str, ...]]  # empty if missing
    columns: Mapping[str, Sequence[Any]]
    people: np.ndarray  # (rows,) the person of each row, numbered from 0
    names: tuple[str, ...]  # of these people, from the data; never leave the site
    unit: str  # "example" where every row counts by itself
    classes: tuple[str, ...] = ()  # names that are public

    def __len__(self) -> int:
        return len(self.content)

    @cached_property
    def contents(self) -> list[str]:
        """A digest of each row's content, "" for an empty row."""
        return [content_digest(item) for item in self.content]


def records_of(rows: Rows, task: str, unit: str | None, classes: Sequence[str] = ()) -> Records:
    """`unit` is the column that names the person of a row; without it every row is its own person."""
    people = unit_numbers(rows, unit)
    of_table = any(isinstance(item, tuple) for item in rows.content)
    labels = [(_table_labels if of_table else _labels)(found, task) for found in rows.labels]
    records = Records(task, rows.content, labels, rows.columns, people, (), unit or "example", tuple(classes))
    return Records(**{**vars(records), "names": _names(records, rows, unit)})


def _labels(found: Any, task: str) -> tuple[str, ...]:
    if found is None:
        return ()
    if task == "tokens":
        return tuple(dict.fromkeys(tag[2:] for tag in found if tag != OUTSIDE)) or ("none",)
    return tuple(dict.fromkeys(found)) if isinstance(found, (list, tuple)) else (str(found),)


def _table_labels(found: Any, task: str) -> tuple[str, ...]:
    """The labels of a table. Regression and survival targets have no classes: only their presence counts."""
    if found is None:
        return ()
    target = target_of(task)
    return tuple(dict.fromkeys(target.names_in(found))) if target.has_classes else (LABELLED,)


def _names(records: Records, rows: Rows, unit: str | None) -> tuple[str, ...]:
    """Names by person number. A row without a name is identified by its content."""
    found: dict[int, str] = {}
    seen: dict[str, int] = {}
    for row, person in enumerate(records.people.tolist()):
        if person in found:
            continue
        value = None if unit is None else rows.columns[unit][row]
        if value is not None and str(value).strip():
            found[person] = f"unit {value}"
            continue
        cells = {name: str(values[row]) for name, values in sorted(records.columns.items())}
        digest = hashlib.sha256(
            repr((records.contents[row], records.labels[row], cells)).encode()
        ).hexdigest()
        seen[digest] = seen.get(digest, 0) + 1
        found[person] = f"row {digest} {seen[digest]}"
    return tuple(found[person] for person in range(len(found)))


def content_digest(item: Any) -> str:
    """The digest of the text or image alone."""
    if item is None:
        return ""
    if isinstance(item, np.ndarray):
        data = f"{item.shape} {item.dtype}".encode() + item.tobytes()
    elif isinstance(item, Path):
        data = item.read_bytes()
    elif isinstance(item, bytes):
        data = item
    else:
        data = (item if isinstance(item, str) else " ".join(map(str, item))).encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()
