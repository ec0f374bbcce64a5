"""How the cells of a table become numbers: each column's filling value, mean, scale or levels.

It is decided once, from the train rows of all clients by counts and sums over them, or read from a file
(`dataset.statistics`), and it is part of the data specification: every client reads its rows by it. A level
that it does not have, and a missing one, share a last level of their own; a missing number gets the column's
median, and a column that has missing numbers an indicator of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import near_names, places, warn
from fedfrozen_app.data.census_statistics import in_order, is_census, noise_of, statistics_of
from fedfrozen_app.tasks.regression import MISSING, number
from fedfrozen_app.tasks.target import word

MOST_LEVELS = 50  # of a column that nobody has named as categorical
FEW_ROWS = 20  # of which numbers may be different by chance
ID = re.compile(r"(^|[_ .])id$|^index$|^Unnamed: 0$", re.IGNORECASE)
MOSTLY = 0.5  # of a column's cells are numbers: then the others are mistakes


@dataclass(frozen=True)
class Numeric:
    name: str
    median: float  # in place of a missing number
    mean: float
    scale: float
    indicator: bool = False  # whether there is a further input: 1 where the number is missing


@dataclass(frozen=True)
class Categorical:
    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessing:
    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(one.name for one in self.numeric), *(one.name for one in self.categorical))

    @property
    def numbers(self) -> int:
        """How many numbers a row has: of the columns, and their indicators."""
        return len(self.numeric) + sum(one.indicator for one in self.numeric)

    @property
    def levels(self) -> tuple[int, ...]:
        """Of each categorical column, with the one for missing and unseen levels."""
        return tuple(len(one.levels) + 1 for one in self.categorical)

    def spec(self) -> dict[str, Any]:
        """For the data specification, and for `table.json`."""
        numeric = {
            one.name: {
                "median": one.median,
                "mean": one.mean,
                "scale": one.scale,
                "indicator": one.indicator,
            }
            for one in self.numeric
        }
        return {"columns": numeric | {one.name: {"levels": list(one.levels)} for one in self.categorical}}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.spec(), separators=(",", ":")).encode()).hexdigest()

    def marks(self) -> dict[str, str]:
        """For the header of every file with the run's arrays: its inputs belong to these columns."""
        return {"columns": self.digest}

    def check_marks(self, marks: Mapping[str, str]) -> None:
        if marks.get("columns", "") != self.digest:
            raise UserError(
                "The table's preprocessing here is not the one that the stored model was trained with (their "
                "digests differ): set dataset.statistics to the table.json in its run's folder."
            )

    def inputs(self, rows: Sequence[Sequence[Any]], columns: Sequence[str], origins: Sequence[str]) -> Inputs:
        """The cells of these columns as tensors: `numbers` (rows, numbers), `categories` (rows, columns)."""
        place = {name: position for position, name in enumerate(columns)}
        if lacking := [name for name in self.columns if name not in place]:
            raise UserError(
                f"These rows have no column {lacking[0]!r}, which the federation reads: add it to the table."
            )
        found, missing = [], []
        for one in self.numeric:
            values = _numbers([row[place[one.name]] for row in rows], one.name, origins)
            gone = np.isnan(values)
            found.append((np.where(gone, one.median, values) - one.mean) / one.scale)
            if one.indicator:
                missing.append(gone.astype(np.float64))
        levels = [
            _level_numbers([row[place[one.name]] for row in rows], one, origins) for one in self.categorical
        ]
        return {
            "numbers": _stacked([*found, *missing], len(rows), torch.float64),
            "categories": _stacked(levels, len(rows), torch.int64),
        }


Inputs = dict[str, Tensor]


def _stacked(columns: Sequence[np.ndarray], rows: int, dtype: torch.dtype) -> Tensor:
    if not columns:
        return torch.zeros(rows, 0, dtype=dtype)
    return torch.from_numpy(np.stack(columns, axis=1)).to(dtype)


def _numbers(cells: Sequence[Any], name: str, origins: Sequence[str]) -> np.ndarray:
    """(rows,), NaN where missing."""
    if all(type(cell) in (int, float) for cell in cells):
        values = np.array(cells, dtype=np.float64)
        if not np.isinf(values).any():
            return values
    read = [number(cell, name, origin) for cell, origin in zip(cells, origins, strict=True)]
    return np.array([np.nan if value is None else value for value in read], dtype=np.float64)


def _level(cell: Any) -> str | None:
    found = word(cell)
    return None if found is None or found.casefold() in MISSING else found


def _level_numbers(cells: Sequence[Any], column: Categorical, origins: Sequence[str]) -> np.ndarray:
    known = {name: position for position, name in enumerate(column.levels)}
    names = [_level(cell) for cell in cells]
    if strange := [row for row, name in enumerate(names) if name is not None and name not in known]:
        has = "has" if len(strange) == 1 else "have"
        shown = ", ".join(repr(name) for name in sorted({str(names[row]) for row in strange})[:5])
        warn(
            f"{counted(len(strange), 'row')} {has} a level of {column.name!r} that no train row has "
            f"({shown}; {places([origins[row] for row in strange])}): it is read as a missing one."
        )
    return np.array([known.get(str(name), len(known)) for name in names], dtype=np.int64)


# Deciding it -----------------------------------------------------------------------------------------------


def preprocessing_of(
    rows: Sequence[Sequence[Any]],
    columns: Sequence[str],
    origins: Sequence[str],
    *,
    categorical: Sequence[str] = (),
    indicators: bool = True,
    normalise: bool = True,
) -> Preprocessing:
    """By the train rows: kinds of columns as named or inferred, medians, means and scales, levels."""
    if strange := [name for name in categorical if name not in columns]:
        raise UserError(
            f"dataset.categorical names {strange[0]!r}, which is no column that is read: those are "
            f"{', '.join(columns)}."
        )
    numeric, levelled = [], []
    for position, name in enumerate(columns):
        cells = [row[position] for row in rows]
        if not any(_level(cell) is not None for cell in cells):
            raise UserError(
                f"Column {name!r} has no value in any train row: leave it out of dataset.columns, or of the "
                "table."
            )
        if name not in categorical and _is_numeric(cells):
            values = _numbers(cells, name, origins)
            _warn_of_row_number(name, values)
            numeric.append(_summed(name, values, indicators, normalise))
        else:
            levelled.append(_levels_of(name, cells, origins, named=name in categorical))
    return Preprocessing(tuple(numeric), tuple(levelled))


def _is_numeric(cells: Sequence[Any]) -> bool:
    """By most of its cells: of a column of numbers a text is a mistake, which reading it reports."""
    names = [name for cell in cells if (name := _level(cell)) is not None]
    return sum(map(_is_number, names)) > MOSTLY * len(names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _summed(name: str, values: np.ndarray, indicators: bool, normalise: bool) -> Numeric:
    known = values[~np.isnan(values)]
    count = len(known)
    mean, scale = 0.0, 1.0
    if normalise:
        mean = float(known.sum()) / count
        scale = (float(((known - mean) ** 2).sum()) / count) ** 0.5 or 1.0  # a constant: nothing to scale
    return Numeric(name, float(np.median(known)), mean, scale, indicators and count < len(values))


def _warn_of_row_number(name: str, values: np.ndarray) -> None:
    """A number of its own for every row predicts nothing, and tells who is who."""
    count = len(values)
    is_counter = count > FEW_ROWS and np.array_equal(np.sort(values) - np.min(values), np.arange(count))
    if is_counter or (count > FEW_ROWS and ID.search(name) and len(np.unique(values)) == count):
        warn(f"Column {name!r} numbers the rows, and the model reads it: dataset.columns leaves it out.")


def _levels_of(name: str, cells: Sequence[Any], origins: Sequence[str], *, named: bool) -> Categorical:
    levels = [_level(cell) for cell in cells]
    found = Counter(level for level in levels if level is not None)
    commas = [row for row, level in enumerate(levels) if level and re.fullmatch(r"[+-]?\d+,\d+", level)]
    if len(commas) > MOSTLY * found.total() and not named:
        raise UserError(
            f"Column {name!r} holds numbers with a comma, such as {levels[commas[0]]!r} in "
            f"{origins[commas[0]]}: write them with a decimal point, or name the column in "
            "dataset.categorical if they are categories."
        )
    for alike in near_names(found):
        others = [origins[row] for row, level in enumerate(levels) if level in alike[1:]]
        shown = ", ".join(f"{level!r} ({found[level]})" for level in alike)
        warn(
            f"Column {name!r} has levels that are nearly the same: {shown}; the rarer ones are in "
            f"{places(others)}."
        )
    if len(found) > MOST_LEVELS and not named:
        raise UserError(
            f"Column {name!r} holds {len(found)} different texts: leave it out with dataset.columns, or "
            "name it in "
            "dataset.categorical if each is a category."
        )
    return Categorical(name, tuple(in_order(list(found))))


def described(found: Preprocessing) -> str:
    """What was inferred, for the log."""
    parts = []
    if found.numeric:
        parts.append("numbers: " + ", ".join(one.name for one in found.numeric))
    if found.categorical:
        named = ", ".join(f"{one.name} ({len(one.levels)})" for one in found.categorical)
        parts.append(f"categories, with their levels: {named}")
    return "; ".join(parts)


# Reading it ------------------------------------------------------------------------------------------------


def read_statistics(path: str) -> dict[str, Any]:
    """A `table.json`: `columns`, and where the label needs some `target`; or a `census.json`."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        if is_census(found):
            found = statistics_of(found)
        preprocessing_from(found)
    except DAMAGED as error:
        raise UserError(
            f"dataset.statistics={path} cannot be read as a table.json or census.json: {error}."
        ) from error
    return dict(found)


def check_noise(path: str) -> None:
    """`UserError` for counts of patients that no noise hides."""
    found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    if is_census(found) and noise_of(found) is None:
        raise UserError(
            f"dataset.statistics={path} is a census without noise, which privacy=dp_sgd does not cover: take "
            "it again with --epsilon, which every site pays from its budget, or give public values."
        )


def preprocessing_from(spec: Mapping[str, Any]) -> Preprocessing:
    """`ValueError` for what is no such specification."""
    numeric, levelled = [], []
    columns = spec.get("columns")
    if not isinstance(columns, Mapping) or not columns:
        raise ValueError("it has no columns")
    for name, own in columns.items():
        if not isinstance(own, Mapping):
            raise ValueError(f"its column {name!r} is no object")
        if (levels := own.get("levels")) is not None:
            if not isinstance(levels, list) or not levels or not all(isinstance(one, str) for one in levels):
                raise ValueError(f"the levels of its column {name!r} are no list of texts")
            levelled.append(Categorical(str(name), tuple(levels)))
            continue
        values = [own.get(key) for key in ("median", "mean", "scale")]
        if (
            not all(isinstance(one, int | float) and np.isfinite(one) for one in values)
            or not own["scale"] > 0
        ):
            raise ValueError(f"its column {name!r} needs a median, a mean and a scale above 0")
        median, mean, scale = (float(own[key]) for key in ("median", "mean", "scale"))
        numeric.append(Numeric(str(name), median, mean, scale, own.get("indicator") is True))
    return Preprocessing(tuple(numeric), tuple(levelled))


# A client's own scale --------------------------------------------------------------------------------------


def rescaled(inputs: Inputs, like: Tensor, columns: int) -> Inputs:
    """The rows' numbers by the mean and deviation of a client's train rows (`like`), of the first columns;
    its indicators stay as they are."""
    own = like[:, :columns]
    mean = own.mean(dim=0)
    scale = ((own - mean) ** 2).mean(dim=0).sqrt()
    scale = torch.where(scale > 1e-9, scale, 1.0)  # a constant: nothing to scale
    numbers = inputs["numbers"].clone()
    numbers[:, :columns] = (numbers[:, :columns] - mean) / scale
    return {**inputs, "numbers": numbers}
