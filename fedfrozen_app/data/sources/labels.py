"""From label names to numbers, for one label a row, several labels a row, and a tag a word."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.account import dropped, near_names, places, rows_read, warn
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Rows
from fedfrozen_app.tasks.entity_tags import most_frequent as most_of
from fedfrozen_app.tasks.target import Target, target_of

logger = logging.getLogger(__name__)
# As spreadsheets and pandas write a value that is not there, in lower case. "none" may well be a class.
MISSING_WORDS = {"nan", "na", "n/a", "#n/a", "#na", "<na>", "null", "nil", "nat", "?", "#value!", "#ref!"}


def clean(rows: Rows, spec: DatasetSpec, split: str, task: str) -> Rows:
    """Only rows with content and a label, and of the classes asked for; what goes is counted."""
    rows_read(split, len(rows.content))
    rows = _without_missing_words(rows, spec, split, task)
    whole = [
        content is not None and label not in (None, [])
        for content, label in zip(rows.content, rows.labels, strict=True)
    ]
    if not any(whole):
        raise UserError(
            f"None of the {len(whole)} rows of {split!r} has both content and a label: check "
            "dataset.label_column, or set the split's name to one with labels."
        )
    if not all(whole):
        lost = [origin for origin, is_whole in zip(rows.origins, whole, strict=True) if not is_whole]
        warn(f"{split}: dropped {len(lost)} of {len(whole)} rows without content or label ({places(lost)}).")
        dropped(split, "no content or no label", len(lost))
        rows = rows.where(whole)
    if target_of(task).has_classes:
        warn_of_near_labels(rows, split, task)
    return rows if spec.keep_classes is None else keep_classes(rows, spec.keep_classes, split, task)


def _without_missing_words(rows: Rows, spec: DatasetSpec, split: str, task: str) -> Rows:
    """A label that is a word for a missing value is none, unless `dataset.keep_classes` names it."""
    single = all(label is None or isinstance(label, str) for label in rows.labels)
    if not (single and target_of(task).has_classes):  # several labels are lists, without a missing one
        return rows
    known = set(spec.keep_classes or ())
    is_word = [
        label is not None and label not in known and label.casefold() in MISSING_WORDS
        for label in rows.labels
    ]
    if not any(is_word):
        return rows
    lost = [origin for origin, word in zip(rows.origins, is_word, strict=True) if word]
    words = ", ".join(sorted({repr(label) for label, word in zip(rows.labels, is_word, strict=True) if word}))
    warn(
        f"{split}: dropped {len(lost)} of {len(is_word)} rows whose label is a word for a missing value "
        f"({words}; {places(lost)}). If it is a class, list all classes in dataset.keep_classes."
    )
    dropped(split, "a word for a missing value as label", len(lost))
    return rows.where([not word for word in is_word])


def warn_of_near_labels(rows: Rows, split: str, task: str) -> None:
    """Classes whose names are nearly the same are most likely one."""
    each = [target_of(task).names_in(row) for row in rows.labels]
    counts = Counter(label for row in each for label in row)
    if over := [label for label in counts if re.search(r"[\r\n]", label)]:
        where = [one for row, one in zip(each, rows.origins, strict=True) if set(row) & set(over)]
        warn(f"{split}: {len(where)} labels go over several lines, such as {over[0]!r} ({places(where)}).")
    for alike in near_names(counts):
        others = [
            origin
            for row, origin in zip(each, rows.origins, strict=True)
            if any(label in alike[1:] for label in row)
        ]
        named = ", ".join(f"{label!r} ({counts[label]})" for label in alike)
        warn(
            f"{split}: labels that are nearly the same are classes of their own: "
            f"{named}; the rarer ones are in {places(others)}."
        )


def keep_classes(rows: Rows, kept: tuple[str, ...], split: str, task: str) -> Rows:
    """Only these classes: other labels go, and with them the rows that have none left."""
    target = target_of(task)
    rows = replace(rows, labels=[target.restricted(label, kept) for label in rows.labels])
    inside = [label is not None for label in rows.labels]
    if target.over_tokens:
        return rows
    logger.info("%s: kept %d of %d rows by their classes", split, sum(inside), len(inside))
    dropped(split, "a class that is not kept", len(inside) - sum(inside))
    rows = rows.where(inside)
    if not rows.content:
        raise UserError(f"No row of {split!r} is of a class in dataset.keep_classes.")
    return rows


def most_frequent(rows: Rows, count: int) -> tuple[str, ...]:
    """The labels of a multi-label task that most rows have, most frequent first; equals by name."""
    found = Counter(label for row in rows.labels for label in set(row))
    return tuple(sorted(found, key=lambda label: (-found[label], label))[:count])


def class_order(
    spec: DatasetSpec,
    train: Rows,
    task: str,
    class_names: tuple[str, ...] | None,
    agreed: tuple[str, ...] | None,
) -> tuple[str, ...]:
    target = target_of(task)
    if not target.has_classes:
        return ()
    present = {name for label in train.labels for name in target.names_in(label)}
    if agreed is not None:
        names = tuple(agreed)
    elif spec.keep_classes is not None:
        absent = [name for name in spec.keep_classes if name not in present]
        if absent:
            raise UserError(f"dataset.keep_classes names {absent[0]!r}, which no train row has.")
        names = target.class_names(spec.keep_classes, in_order=True)
    elif class_names is not None:
        names = class_names
    else:
        names = target.class_names(present, in_order=False)
    if len(names) < 2:
        raise UserError(
            f"The train rows have {len(names)} class ({', '.join(names)}): at least 2 are needed; "
            "check dataset.path and dataset.label_column."
        )
    if len(set(names)) != len(names):
        raise UserError(f"The class names are not distinct: {', '.join(names)}.")
    return names


def number(rows: Rows, task: str, names: tuple[str, ...], agreed: tuple[str, ...] | None) -> Any:
    """Labels as int64 (n,), several as 0 and 1 of int64 (n, classes), tags as a list of numbers for each
    row; where there are no classes, what the kind of target makes of them."""
    target = target_of(task)
    if not target.has_classes:
        return target.numbered(rows.labels, {})
    place = {name: position for position, name in enumerate(names)}
    for found, origin in zip(rows.labels, rows.origins, strict=True):
        for label in [found] if isinstance(found, str) else found:
            if label not in place:
                among = "the agreed classes" if agreed is not None else "the classes of the train rows"
                raise UserError(
                    f"Label {label!r} of {origin} is not among {among} ({_shown(names)}): "
                    "correct it or leave the row out."
                )
    return target.numbered(rows.labels, place)


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


# What rows are dealt out by -----------------------------------------------------------------------------


def unit_numbers(rows: Rows, unit: str | None) -> np.ndarray:
    """(n,): which rows belong together; every row to itself where there is no unit."""
    if unit is None:
        return np.arange(len(rows.content))
    # Rows without a name are not all one patient's.
    named = enumerate(rows.columns[unit])
    values = [row if value is None or not str(value).strip() else str(value) for row, value in named]
    place = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return np.array([place[value] for value in values], dtype=np.int64)


def strata(rows: Rows, target: Target, units: np.ndarray) -> list[str]:
    """One name for each row's label mix, the same for all rows of a unit: what most of its rows have.

    Of several labels the primary one counts; of tags the entity type that occurs most.
    """
    if len(np.unique(units)) == len(units):  # every row to itself: nothing to count
        return target.strata(rows.labels)
    totals: dict[int, Counter[str]] = {}
    for unit, counts in zip(units.tolist(), target.mixes(rows.labels), strict=True):
        totals.setdefault(unit, Counter()).update(counts)
    top = {unit: most_of(counts) for unit, counts in totals.items()}
    return [top[unit] for unit in units.tolist()]


def stratum_numbers(found: list[str], names: tuple[str, ...]) -> np.ndarray:
    """(n,) of numbers, by these names."""
    place = {name: position for position, name in enumerate(names)}
    return np.array([place[name] for name in found], dtype=np.int64)
