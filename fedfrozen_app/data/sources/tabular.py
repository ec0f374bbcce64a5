"""Tables with a row an example: parquet, CSV, TSV, JSON lines, and the Hugging Face hub."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import file_read, warn
from fedfrozen_app.data.sources.delimited import delimited_frame, file_bytes
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Frame, Rows, existing, first_line, reads

if TYPE_CHECKING:  # the import takes a second, which texts and tables do not need
    import datasets

logger = logging.getLogger(__name__)
TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl")  # each also with .gz behind it
TEXT_FILES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES))
MakeRows = Callable[[DatasetSpec, Frame, Frame | None], Found]  # of the train and the test table


def read_parquet(spec: DatasetSpec) -> Found:
    """Hugging Face parquet files, named by split or one a domain."""
    return read_tables(spec, (".parquet",), parquet_frame)


@reads("classification", "multilabel")
def read_text(spec: DatasetSpec) -> Found:
    """CSV, TSV or JSON lines, named by split, with a split column, or one a domain."""
    return read_tables(spec, TEXT_FILES, text_frame)


def read_hub(spec: DatasetSpec) -> Found:
    """A data set by its name on the Hugging Face hub."""
    import datasets

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


def found_in(spec: DatasetSpec, frames: Mapping[str, Frame], title: str, names: Iterable[str] = ()) -> Found:
    """The train and the test rows of these tables; of one without a name, by its column `split`, if any."""
    if (alone := frames.get("")) is not None:
        return _from_frames(spec, *by_split_column(spec, alone))
    if spec.train_split not in frames:
        raise UserError(
            f"{title} has no split {spec.train_split!r}: "
            f"set dataset.train_split to one of {', '.join(names or frames)}."
        )
    return _from_frames(spec, frames[spec.train_split], frames.get(spec.test_split))


def read_tables(
    spec: DatasetSpec,
    suffixes: tuple[str, ...],
    read: Callable[[Path], Frame],
    make: MakeRows | None = None,
) -> Found:
    """The files of a folder, or one file; `make` interprets its columns: by default content and label."""
    make = make or _from_frames
    root = existing(spec)
    files = [root]
    if root.is_dir():
        files = sorted(
            file for file in root.rglob("*") if file.name.endswith(suffixes) and not file.name.startswith(".")
        )
    elif not root.name.endswith(suffixes):
        raise UserError(f"dataset.path={spec.path} is not a {' or '.join(suffixes)} file.")
    if not files:
        raise UserError(f"No {' or '.join(suffixes)} file found in {root}: check dataset.path.")

    train_files = [file for file in files if belongs(file, root, spec.train_split)]
    test_files = [file for file in files if belongs(file, root, spec.test_split)]
    if train_files:
        ignored = [file.name for file in files if file not in train_files + test_files]
        if ignored:
            warn(f"{root}: not read, neither {spec.train_split} nor {spec.test_split}: {', '.join(ignored)}.")
        test = joined([read(file) for file in test_files]) if test_files else None
        return make(spec, joined([read(file) for file in train_files]), test)
    if test_files:
        raise UserError(
            f"{root} has a {spec.test_split!r} file but no {spec.train_split!r} file: "
            "set dataset.train_split to the name of the train file."
        )
    frames = [read(file) for file in files]
    if len(frames) > 1:
        logger.info("%s: no file is named %s, so every file is a domain", root, spec.train_split)
        for file, frame in zip(files, frames, strict=True):
            frame.cells["domain"] = [_stem(file)] * len(frame.origins)
    return make(spec, *by_split_column(spec, joined(frames)))


def _stem(file: Path) -> str:
    return file.name.split(".")[0]


def belongs(file: Path, root: Path, split: str) -> bool:
    """Whether a file is a split's by name: train.csv, train-00000-of-00002.parquet, train/0.csv."""
    if re.match(rf"{re.escape(split)}([-_]|$)", _stem(file)):
        return True
    return file != root and split in file.relative_to(root).parts[:-1]


def parquet_frame(file: Path) -> Frame:
    import datasets

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
        elif names := tuple(getattr(feature, "names", None) or ()):  # a ClassLabel
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


def text_frame(file: Path) -> Frame:
    is_json = ".jsonl" in file.suffixes
    return _json_frame(file) if is_json else delimited_frame(file)


def _json_frame(file: Path) -> Frame:
    try:
        lines = io.StringIO(file_bytes(file).decode("utf-8-sig")).readlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} cannot be read as JSON lines ({first_line(error)}).") from error
    records: list[dict[str, Any]] = []
    origins = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_record)
        except ValueError as error:
            raise UserError(f"Line {number} of {file} is not valid JSON ({error}).") from error
        if not isinstance(record, dict):
            raise UserError(f"Line {number} of {file} is not a JSON object.")
        records.append(record)
        origins.append(f"line {number} of {file.name}")
    names = dict.fromkeys(name for record in records for name in record)
    file_read(file.name, rows=len(records), encoding="utf-8", columns=list(names))
    return Frame({name: [record.get(name) for record in records] for name in names}, origins)


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's own reader would keep the last of two values in silence."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("one of its keys is there twice")
    return record


def joined(frames: list[Frame]) -> Frame:
    """Several files below one another, with the columns that all of them have."""
    first = frames[0]
    common = [name for name in first.cells if all(name in frame.cells for frame in frames)]
    if lost := sorted({name for frame in frames for name in frame.cells} - set(common)):
        warn(f"Columns that some files alone have are not read: {', '.join(lost)}.")
    return Frame(
        {name: [value for frame in frames for value in frame.cells[name]] for name in common},
        [origin for frame in frames for origin in frame.origins],
        {name for name in first.images if name in common},
        {
            name: names
            for name, names in first.class_names.items()
            if all(frame.class_names.get(name) == names for frame in frames)
        },
    )


def by_split_column(spec: DatasetSpec, frame: Frame) -> tuple[Frame, Frame | None]:
    """(train, test) by a column named split, where there is one."""
    if "split" not in frame.cells:
        return frame, None
    values = frame.cells.pop("split")

    def part(wanted: str) -> Frame:
        rows = [row for row, value in enumerate(values) if value == wanted]
        cells = {name: [cell[row] for row in rows] for name, cell in frame.cells.items()}
        return Frame(cells, [frame.origins[r] for r in rows], frame.images, frame.class_names)

    train, test = part(spec.train_split), part(spec.test_split)
    if not train.origins:
        have = ", ".join(sorted({str(value) for value in values}))
        raise UserError(
            f"No row has {spec.train_split!r} in its column 'split': "
            f"set dataset.train_split to one of {have}."
        )
    ignored = len(values) - len(train.origins) - len(test.origins)
    if ignored:
        named = f"{spec.train_split} nor {spec.test_split}"
        warn(f"{counted(ignored, 'row')} not read: their split is neither {named}.")
    return train, test if test.origins else None


def _from_frames(spec: DatasetSpec, train: Frame, test: Frame | None) -> Found:
    content, is_image = _content_column(spec, train)
    guesses = ("label", "labels", "class")
    several = spec.task == "multilabel"
    label = pick(train, spec.label_column, "dataset.label_column", guesses)
    absent = [] if test is None else [name for name in (content, label) if name not in test.cells]
    if absent:
        raise UserError(
            f"The test rows have no column {absent[0]!r}, which the train rows have: "
            "add it or set dataset.test_split to another split."
        )

    def rows(frame: Frame) -> Rows:
        others = {
            name: [value.strip() if isinstance(value, str) else value for value in values]
            for name, values in frame.cells.items()
            if name not in (content, label) and name not in frame.images and is_scalar(values)
        }
        read = _labels if several else _label
        labels = [
            read(value, label, origin)
            for value, origin in zip(frame.cells[label], frame.origins, strict=True)
        ]
        found = frame.cells[content]
        if not is_image:
            found = [str(text) if text is not None and str(text).strip() else None for text in found]
        return Rows(found, labels, others, frame.origins)

    test_rows = None if test is None else rows(test)
    task = "image" if is_image else "multilabel" if several else "text"
    return Found(task, rows(train), test_rows, train.class_names.get(label))


def _content_column(spec: DatasetSpec, frame: Frame) -> tuple[str, bool]:
    """The column that the model reads, and whether it holds images."""
    if spec.image_column is None and (spec.text_column is not None or not frame.images):
        return pick(frame, spec.text_column, "dataset.text_column", ("text", "sentence")), False
    column = pick(frame, spec.image_column, "dataset.image_column", sorted(frame.images))
    if column not in frame.images:
        raise UserError(f"dataset.image_column={column!r} holds no images.")
    return column, True


def pick(frame: Frame, wanted: str | None, option: str, guesses: Iterable[str]) -> str:
    have = ", ".join(frame.cells)
    if wanted is not None:
        if wanted not in frame.cells:
            raise UserError(f"{option}={wanted!r} is not a column: the data have {have}.")
        return wanted
    candidates = [guess for guess in guesses if guess in frame.cells]
    if len(candidates) != 1:
        raise UserError(f"Set {option} to the column to use: the data have {have}.")
    return candidates[0]


def _label(value: Any, column: str, origin: str) -> str | None:
    value = value.strip() if isinstance(value, str) else value
    if value is None or value != value or value == "":  # a missing number is the one unlike itself
        return None
    if isinstance(value, list | dict):
        raise UserError(
            f"Column {column!r} holds more than one value in {origin}: "
            "set dataset.label_column to a column with one label a row, or dataset.task=multilabel."
        )
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _labels(value: Any, column: str, origin: str) -> list[str]:
    """Several labels: a list, or names with ; between them. The first is the primary one."""
    items = value if isinstance(value, list) else [] if value is None else str(value).split(";")
    found = (_label(item, column, origin) for item in items)
    return list(dict.fromkeys(label for label in found if label is not None))


def is_scalar(values: list[Any]) -> bool:
    return not any(isinstance(value, list | dict | bytes) for value in values)
