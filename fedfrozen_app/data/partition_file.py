"""`partition=file`: the client of each train row, out of a file of one's own.

CSV with a column `client`, a line for each row of the train table in its order, or with a column `row`
beside it (from 0) in any order. JSON: a list of clients in the rows' order, or {"client": [rows]}.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError

COLUMN = "client"


def read_clients(path: str | None, rows: int) -> np.ndarray:
    """(rows,) the client's name of every train row."""
    if path is None:
        raise UserError("partition=file needs the file that names each row's client: set partition.path.")
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"partition.path={path} cannot be read ({error}): give a CSV or JSON file."
        ) from error
    pairs = _json(text, path) if place.suffix.lower() == ".json" else _csv(text, path)
    names: list[str | None] = [None] * rows
    for row, client in pairs:
        if not 0 <= row < rows:
            raise UserError(
                f"partition.path={path} names row {row}, and the data set has {rows} train rows, from 0 on: "
                "name each of them once, and set no dataset.limit."
            )
        if names[row] is not None:
            raise UserError(f"partition.path={path} names row {row} twice: give every row one client.")
        names[row] = client
    if None in names:
        raise UserError(
            f"partition.path={path} names no client for row {names.index(None)} of {rows} train rows: give "
            "every row one."
        )
    return np.array(names, dtype=object)


def _csv(text: str, path: str) -> list[tuple[int, str]]:
    lines = list(csv.DictReader(text.splitlines()))
    if not lines or COLUMN not in lines[0]:
        raise UserError(
            f"partition.path={path} has no column {COLUMN}: give it a first line, such as row,client."
        )
    return [
        (_number(line["row"], path) if "row" in line else number, _name(line[COLUMN], path))
        for number, line in enumerate(lines)
    ]


def _json(text: str, path: str) -> list[tuple[int, str]]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"partition.path={path} is no JSON ({error}): mend it.") from error
    if isinstance(data, list):
        return [(number, _name(client, path)) for number, client in enumerate(data)]
    if isinstance(data, dict) and all(isinstance(rows, list) for rows in data.values()):
        return [(_number(row, path), _name(client, path)) for client, rows in data.items() for row in rows]
    raise UserError(f"partition.path={path} must be a list of clients, or of each client a list of its rows.")


def _number(value: Any, path: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(value, (bool, float)):
        raise UserError(f"partition.path={path} names the row {value!r}, which is no row number, 0 or more.")
    return number


def _name(value: Any, path: str) -> str:
    if isinstance(value, (bool, dict, list, float)) or value is None or not str(value).strip():
        raise UserError(f"partition.path={path} names the client {value!r}: give a word or a whole number.")
    return str(value).strip()
