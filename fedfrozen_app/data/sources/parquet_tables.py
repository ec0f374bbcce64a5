"""Tables with a row an example: parquet files, and the Hugging Face hub.

A module of its own, which is imported when such a table is read: `datasets` brings pandas, pyarrow and an
HTTP library, which a run on other data does not wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Frame, first_line
from fedfrozen_app.data.sources.tabular import found_in, read_tables


def read_parquet(spec: DatasetSpec) -> Found:
    """Hugging Face parquet files, named by split or one a domain."""
    return read_tables(spec, (".parquet",), parquet_frame)


def read_hub(spec: DatasetSpec) -> Found:
    """A data set by its name on the Hugging Face hub."""
    name, _, config = str(spec.path).partition(":")
    try:
        splits: Any = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"Could not load {spec.path!r} from the Hugging Face hub ({first_line(error)}): check "
            "the name and the network, or use files with dataset.kind=parquet and dataset.path."
        ) from error
    return from_splits(spec, splits, str(spec.path))


def from_splits(spec: DatasetSpec, splits: Mapping[str, Any], title: str) -> Found:
    """The rows of a `DatasetDict`, by the names that the settings give its splits."""
    frames = {
        name: arrow_frame(splits[name].with_format("arrow")[:], splits[name].features, name, Path())
        for name in (spec.train_split, spec.test_split)
        if name in splits
    }
    return found_in(spec, frames, title, list(splits))


def parquet_frame(file: Path) -> Frame:
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as parquet ({error}).") from error
    features = datasets.Features.from_arrow_schema(table.schema)
    return arrow_frame(table, features, file.name, file.parent)


def arrow_frame(table: pyarrow.Table, features: datasets.Features, origin: str, folder: Path) -> Frame:
    frame = Frame({}, [f"row {row} of {origin}" for row in range(table.num_rows)])
    for name in table.column_names:
        column, feature = table[name], features.get(name)
        kind = column.type
        if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            frame.images.add(name)
            frame.cells[name] = _image_cells(column, folder)
        elif pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
            frame.images.add(name)
            frame.cells[name] = column.to_pylist()
        elif isinstance(feature, datasets.ClassLabel) and feature.names:
            names = tuple(feature.names)
            frame.class_names[name] = names
            # The hub writes -1 where the label is kept secret. A number past the last name stays a
            # number, which the check of the labels then reports.
            by_number: dict[int | None, str | None] = {
                None: None,
                -1: None,
                **dict(enumerate(names)),
            }
            frame.cells[name] = [by_number.get(value, str(value)) for value in column.to_pylist()]
        else:
            frame.cells[name] = column.to_pylist()
    return frame


def _image_cells(column: pyarrow.ChunkedArray, folder: Path) -> list[Any]:
    """The bytes of a Hugging Face image column, or the file that it points to instead."""
    found = pyarrow.compute.struct_field(column, "bytes").to_pylist()
    if column.type.get_field_index("path") < 0:
        return found
    paths = pyarrow.compute.struct_field(column, "path").to_pylist()
    return [
        folder / path if data is None and path is not None else data
        for data, path in zip(found, paths, strict=True)
    ]
