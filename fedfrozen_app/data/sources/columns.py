"""Tables of columns: CSV, TSV and Parquet files, in one file, files by split, or one file for each site; and
what a SELECT gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.account import accounting, file_read
from fedfrozen_app.data.preprocessing import (
    Inputs,
    Preprocessing,
    described,
    preprocessing_from,
    preprocessing_of,
    read_statistics,
)
from fedfrozen_app.data.sources.delimited import delimited_frame
from fedfrozen_app.data.sources.omop import plain_cell, query_rows
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Frame, Rows, existing
from fedfrozen_app.data.sources.tabular import belongs, by_split_column, joined
from fedfrozen_app.tasks.regression import MISSING
from fedfrozen_app.tasks.table_targets import KINDS, NOT_TABLES, task_of
from fedfrozen_app.tasks.target import Target, target_of

logger = logging.getLogger(__name__)
PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".csv", ".tsv", ".data", ".csv.gz", ".tsv.gz", ".data.gz")
SHOWN = 5  # names of columns in a sentence
SITE = "domain"  # the column that says a row's file, where each file is a site


class _TableTasks:
    """Of the reader: every kind of target that a table can hold, installed packages' included."""

    def __get__(self, instance: Any, owner: Any) -> tuple[str, ...]:
        return (*KINDS, *(name for name in registry.names("tasks") if name not in NOT_TABLES))


class TableReader:
    """What `dataset.kind=table` reads."""

    tasks = _TableTasks()
    needs_path = True

    def __call__(self, spec: DatasetSpec) -> Found:
        frames = _files(spec) if spec.query is None else by_split_column(spec, _selected(spec, spec.query))
        return found_in_columns(spec, *frames)


read_table = TableReader()


def _files(spec: DatasetSpec) -> tuple[Frame, Frame | None]:
    """(train, test)."""
    root = existing(spec)
    files = [root]
    if root.is_dir():
        files = sorted(f for f in root.rglob("*") if f.name.endswith(SUFFIXES) and not f.name.startswith("."))
        if not files:
            raise UserError(f"No table ({', '.join(SUFFIXES[:4])}) found in {root}: check dataset.path.")
    train_files = [file for file in files if belongs(file, root, spec.train_split)]
    if train_files:
        test_files = [file for file in files if belongs(file, root, spec.test_split)]
        test = _together(test_files, spec) if test_files else None
        return _together(train_files, spec), test
    return by_split_column(spec, _together(files, spec))


def _parquet(file: Path) -> Frame:
    from fedfrozen_app.data.sources.parquet_tables import parquet_frame  # see its docstring

    return parquet_frame(file)


def _selected(spec: DatasetSpec, query: str) -> Frame:
    """The columns of a SELECT."""
    names, rows = query_rows(str(spec.path), query)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"The query gives the column {twice!r} twice: name one of them AS something else.")
    if not rows:
        raise UserError("The query gives no rows: widen the cohort.")
    cells = {
        name: [None if row[place] is None else plain_cell(row[place]) for row in rows]
        for place, name in enumerate(names)
    }
    file_read(Path(str(spec.path)).name, rows=len(rows), columns=names)
    return Frame(cells, [f"row {row} of the query" for row in range(len(rows))])


def _together(files: Sequence[Path], spec: DatasetSpec) -> Frame:
    frames = [_parquet(file) if file.name.endswith(PARQUET) else delimited_frame(file) for file in files]
    if len(frames) > 1:
        logger.info("Every file is a site of its own, in the column %r.", SITE)
        needed = spec.columns or {name: None for frame in frames for name in frame.cells}
        for file, frame in zip(files, frames, strict=True):
            if lacking := [name for name in needed if name not in frame.cells]:
                raise UserError(
                    f"{file.name} lacks the column {lacking[0]!r}, which the model is to read: add it, or "
                    "name the "
                    "columns that all files have in dataset.columns."
                )
            frame.cells[SITE] = [_site(file)] * len(frame.origins)
    return joined(frames)


def _site(file: Path) -> str:
    name = file.name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def found_in_columns(spec: DatasetSpec, train: Frame, test: Frame | None) -> Found:
    """Rows whose content are the cells of the columns that the model reads, in their order."""
    task = task_of(spec)
    target = target_of(task)
    labels = target.label_columns(spec)
    have = ", ".join(train.cells)
    for name in (*labels, *(spec.columns or ())):
        if name not in train.cells:
            key = "columns" if name not in labels else "label_column"
            key = next((k for k in ("time_column", "event_column") if getattr(spec, k) == name), key)
            raise UserError(f"dataset.{key} names {name!r}, which is no column: the data have {have}.")
    columns = tuple(spec.columns or _inferred(spec, train, labels))
    if not columns:
        raise UserError(f"The table has no column to predict {labels[0]!r} from: it has {have}.")
    if both := [name for name in columns if name in labels]:
        raise UserError(f"dataset.columns names {both[0]!r}, which is the label: leave it out.")
    if test is not None and (absent := [n for n in (*labels, *columns) if n not in test.cells]):
        raise UserError(f"The test rows have no column {absent[0]!r}, which the train rows have: add it.")
    rows = _rows(spec, target, labels, columns, train)
    _check_any_value(rows, "train", columns, spec)
    tested = None if test is None else _rows(spec, target, labels, columns, test)
    return Found(task, rows, tested, fields=columns)


def _inferred(spec: DatasetSpec, frame: Frame, labels: Sequence[str]) -> list[str]:
    """All columns but the label, the site's, the unit's, and those that are named as no input."""
    apart = {*labels, SITE, spec.unit_column, spec.label_column, *(spec.not_columns or ())}
    found = [name for name in frame.cells if name not in apart]
    if lists := [
        name for name in found if any(isinstance(cell, list | dict | bytes) for cell in frame.cells[name])
    ]:
        raise UserError(f"Column {lists[0]!r} holds no plain values: name the others in dataset.columns.")
    return found


def _rows(
    spec: DatasetSpec, target: Target, labels: Sequence[str], columns: Sequence[str], frame: Frame
) -> Rows:
    named = list(zip(*(frame.cells[name] for name in labels), strict=True))
    found = [
        target.read_label(cells, labels, origin) for cells, origin in zip(named, frame.origins, strict=True)
    ]
    content = [_whole(cells, spec) for cells in zip(*(frame.cells[name] for name in columns), strict=True)]
    others = {name: list(map(_plain, cells)) for name, cells in frame.cells.items() if _scalars(cells)}
    return Rows(content, found, others, frame.origins)


def _check_any_value(rows: Rows, split: str, columns: Sequence[str], spec: DatasetSpec) -> None:
    if any(cells is not None for cells in rows.content) or not rows.content:
        return
    shown = ", ".join(columns[:SHOWN]) + (f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else "")
    start = f"None of the {len(rows.content)} rows of {split!r} has"
    if spec.missing == "drop":
        raise UserError(
            f"{start} a value in every column that the model reads ({shown}): set dataset.missing=median, or "
            "name fewer columns in dataset.columns."
        )
    raise UserError(
        f"{start} a value in any column that the model reads ({shown}): name other columns in "
        "dataset.columns."
    )


def _whole(cells: tuple[Any, ...], spec: DatasetSpec) -> tuple[Any, ...] | None:
    """None for a row without any value; with `dataset.missing=drop` for one without all."""
    missing = [_is_missing(cell) for cell in cells]
    return None if (any(missing) if spec.missing == "drop" else all(missing)) else cells


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell or (isinstance(cell, str) and cell.strip().casefold() in MISSING)


def _plain(cell: Any) -> Any:
    return cell.strip() if isinstance(cell, str) else cell


def _scalars(cells: Sequence[Any]) -> bool:
    return not any(isinstance(cell, list | dict | bytes) for cell in cells)


def cells_of(
    spec: DatasetSpec, fields: Sequence[str], parts: tuple[Rows, Rows], agreed: Preprocessing | None
) -> tuple[tuple[Preprocessing, list[Inputs]], list[str]]:
    """The cells of train and test rows as numbers, by what was agreed or else by the train rows; and what
    looked wrong."""
    train = parts[0]
    with accounting() as account:
        if agreed is None and spec.statistics is not None:
            agreed = preprocessing_from(read_statistics(spec.statistics))
        if agreed is None:
            agreed = preprocessing_of(
                *(train.content, fields, train.origins),
                categorical=spec.categorical or (),
                indicators=spec.indicators,
                normalise=spec.normalise != "none",
            )
            logger.info("%s: %s", spec.name, described(agreed))
        found = [agreed.inputs(part.content, fields, part.origins) for part in parts]
    return (agreed, found), account.warnings
