"""The part of a proposal that defines how all sites encode a table's cells as numbers: the same columns,
levels, medians and scales. A site reads them; none is computed from its rows for the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import DatasetConfig, setting
from fedfrozen_app.config.strict_values import read_strict
from fedfrozen_app.tasks.table_targets import task_of

COLUMNS, TARGET = "table", "target"  # the corresponding keys of a data spec
MOST_COLUMNS, MOST_LEVELS, LONGEST_NAME = 2_000, 10_000, 200


@dataclass(frozen=True)
class NumericColumn:
    median: float
    mean: float
    scale: float
    indicator: bool


@dataclass(frozen=True)
class LevelsColumn:
    levels: tuple[str, ...]


@dataclass(frozen=True)
class TablePart:
    task: str  # the kind of target
    normalise: str = setting("federation", "", choices=("federation", "site", "none"))
    columns: dict[str, Any] = setting({}, "")
    target: dict[str, Any] = setting({}, "")  # its settings, such as edges of intervals

    def spec(self) -> dict[str, Any]:
        """The table's entries in a client's data spec."""
        return {COLUMNS: {"columns": self.columns}, TARGET: self.target}


def table_part(dataset: DatasetConfig, data_spec: Mapping[str, Any]) -> dict[str, Any]:
    """The proposed settings of a table."""
    return {
        "task": task_of(dataset),
        "normalise": dataset.normalise,
        "columns": data_spec[COLUMNS]["columns"],
        "target": data_spec[TARGET],
    }


def read_table_part(given: Any) -> TablePart:
    """Parse the table part; `ValueError` if it is invalid."""
    part = read_strict(TablePart, given, "table.", whole=True)
    if not 0 < len(part.columns) <= MOST_COLUMNS:
        raise ValueError(f"table.columns are none, or more than {MOST_COLUMNS}")
    for name, own in part.columns.items():
        _check_name(name, "table.columns")
        if isinstance(own, Mapping) and "levels" in own:
            levels = read_strict(LevelsColumn, own, "table.columns.", whole=True).levels
            if not 0 < len(levels) <= MOST_LEVELS or len(set(levels)) < len(levels):
                raise ValueError("table.columns: levels are none, not distinct, or too many")
            for level in levels:
                _check_name(level, "table.columns.levels")
        elif read_strict(NumericColumn, own, "table.columns.", whole=True).scale <= 0:
            raise ValueError("table.columns: a scale is not above 0")
    for key, value in part.target.items():
        _check_name(key, "table.target")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                _check_name(item, "table.target")
            elif not isinstance(item, int | float):
                raise ValueError("table.target is more than numbers and words")
    return part


def _check_name(text: str, where: str) -> None:
    if not 0 < len(text) <= LONGEST_NAME or not text.isprintable():
        raise ValueError(f"{where} has a name that is no line of {LONGEST_NAME} characters")
