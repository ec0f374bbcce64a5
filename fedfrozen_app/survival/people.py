"""The people of a study at one site: follow-up time and event of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError

MISSING = ("", "na", "nan", "none", "null", "?")  # how tables write a missing value
YES, NO = ("1", "1.0", "true"), ("0", "0.0", "false")
ALL = "all"  # the only group, if none are requested


@dataclass(frozen=True)
class Columns:
    """The columns that a study reads."""

    time: str
    event: str
    group: str | None = None
    levels: tuple[str, ...] = (ALL,)
    covariates: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.time, self.event, *([self.group] if self.group else ()), *self.covariates)


@dataclass(frozen=True)
class People:
    time: np.ndarray  # (people,) in days, or the column's unit
    event: np.ndarray  # (people,) bool; False: censored, known to be free of the event until then
    group: np.ndarray  # (people,) number of the level
    covariates: np.ndarray  # (people, covariates)
    kept: np.ndarray  # (people,) which row of the table each one is
    left_out: int = 0  # rows with a missing value in one of the columns

    def __len__(self) -> int:
        return len(self.time)


def read_people(table: Mapping[str, Sequence[Any]], columns: Columns, complete: Sequence[str] = ()) -> People:
    """Read the rows that have values in all of these columns, and in the columns `complete`; `UserError` for
    an invalid value."""
    needed = dict.fromkeys((*columns.names, *complete))
    for name in needed:
        if name not in table:
            raise UserError(f"There is no column {name}: the rows have {', '.join(table)}.")
    texts = {name: [_text(value) for value in table[name]] for name in needed}
    count = len(texts[columns.time])
    full = [all(values[row] is not None for values in texts.values()) for row in range(count)]
    kept = np.flatnonzero(np.array(full, dtype=bool))
    chosen = {name: [str(values[row]) for row in kept] for name, values in texts.items()}
    time = _numbers(columns.time, chosen[columns.time])
    if len(time) and time.min() < 0:
        raise UserError(
            f"The column {columns.time} holds {time.min():g}: no one is followed for a time below 0. "
            "Mend the rows, or leave them out."
        )
    found = [_numbers(name, chosen[name]) for name in columns.covariates]
    covariates = np.stack(found, axis=1) if found else np.zeros((len(kept), 0))
    return People(
        time, _events(columns.event, chosen), _groups(columns, chosen), covariates, kept, count - len(kept)
    )


def _text(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    return None if text.casefold() in MISSING else text


def _numbers(name: str, texts: Sequence[str]) -> np.ndarray:
    found = np.empty(len(texts))
    for place, text in enumerate(texts):
        try:
            found[place] = float(text)
        except ValueError:
            found[place] = np.nan
        if not np.isfinite(found[place]):
            raise UserError(
                f"The column {name} holds {text[:40]!r}, which is no number: encode it as numbers."
            )
    return found


def _events(name: str, texts: Mapping[str, Sequence[str]]) -> np.ndarray:
    found = np.zeros(len(texts[name]), dtype=bool)
    for place, text in enumerate(texts[name]):
        if text.casefold() not in YES + NO:
            raise UserError(
                f"The column {name} holds {text[:40]!r}: write 1 where the event happened and 0 "
                "where it was not seen until then."
            )
        found[place] = text.casefold() in YES
    return found


def _groups(columns: Columns, texts: Mapping[str, Sequence[str]]) -> np.ndarray:
    if columns.group is None:
        return np.zeros(len(texts[columns.time]), dtype=np.int64)
    place = {level: number for number, level in enumerate(columns.levels)}
    for text in texts[columns.group]:
        if text not in place:
            raise UserError(
                f"The column {columns.group} holds {text[:40]!r}, which is none of the groups "
                f"{', '.join(columns.levels)}: name it with --group, or mend the rows."
            )
    return np.array([place[text] for text in texts[columns.group]], dtype=np.int64)
