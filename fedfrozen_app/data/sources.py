"""Reading data sets: from a folder, a file or a name to tensors in memory.

Every reader gives the same plain rows (content, class name, other columns). From there on one path
numbers the classes, holds out a test set where the data bring none, and decodes or tokenises once.
A site of a deployed federation calls the same :func:`load` on its own folder, with the classes that
all sites have agreed on.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
from PIL import Image
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.errors import UserError

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl")  # each also with .gz behind it


@dataclass(frozen=True)
class DatasetSpec:
    """Where the data are and how to read them."""

    name: str = "digits"
    kind: str = "digits"  # digits, images, parquet, text or hub
    path: str | None = None  # folder or file; for hub "owner/name" or "owner/name:config"
    train_split: str = "train"  # folder, file, split-column or hub name of the train rows
    test_split: str = "test"
    image_column: str | None = None  # columns: None means look for the obvious one
    label_column: str | None = None
    text_column: str | None = None
    image_size: int | None = None  # side in pixels; None keeps the images' own common size
    channels: int | None = None  # 1 or 3; None: 1 where every image is grey, else 3
    max_tokens: int = 128
    test_fraction: float = 0.2  # held out per class where the data bring no test split
    split_seed: int = 0  # not the run's seed: all runs share one test set
    limit: int | None = None  # at most so many rows of train and of test, for quick tries
    keep_classes: tuple[str, ...] | None = None  # drop the rows of all other classes
    mean: tuple[float, ...] | None = None  # per channel in 0..1; None: from the train pixels
    std: tuple[float, ...] | None = None


@dataclass
class _Rows:
    """Rows as found: content not yet decoded, labels still names."""

    content: list[Any]  # an image as bytes, path or array; a text as str; None where missing
    labels: list[str | None]
    columns: dict[str, list[Any]]
    origins: list[str]  # where each row came from, for error sentences

    def take(self, index: Iterable[int]) -> _Rows:
        rows = list(index)
        return _Rows(
            [self.content[row] for row in rows],
            [self.labels[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.columns.items()},
            [self.origins[row] for row in rows],
        )

    def where(self, keep: Sequence[bool]) -> _Rows:
        return self.take(row for row, kept in enumerate(keep) if kept)


@dataclass
class _Found:
    """What a reader hands over."""

    task: str
    train: _Rows
    test: _Rows | None  # None: the data bring no test split
    class_names: tuple[str, ...] | None = None  # in the order that the data themselves give


@dataclass
class _Frame:
    """A table file, or a split from the hub, as plain lists."""

    cells: dict[str, list[Any]]
    origins: list[str]
    images: set[str] = field(default_factory=set)  # the columns that hold images
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def load(
    spec: DatasetSpec,
    tokenizer: PreTrainedTokenizerBase | None = None,
    classes: tuple[str, ...] | None = None,
) -> Corpus:
    """Read a data set whole.

    ``classes`` fixes the class order, as sites that train together must; a label outside it is an
    error. Without ``tokenizer``, text becomes bytes (ByT5's numbering), which needs no file. A
    tokenizer that has no padding token is given its end token for it.
    """
    _check(spec)
    found = _READERS[spec.kind](spec)
    train = _clean(found.train, spec, spec.train_split)
    test = None if found.test is None else _clean(found.test, spec, spec.test_split)
    names = _class_order(spec, train, found.class_names, classes)
    if test is None:
        train, test = _hold_out(train, spec)
    train_labels, test_labels = _number(train, names, classes), _number(test, names, classes)
    if spec.limit is not None:
        train, train_labels = _limited(train, train_labels, spec)
        test, test_labels = _limited(test, test_labels, spec)

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocab_size = pad_token_id = 0
    if found.task == "image":
        train_inputs, test_inputs = _images(train, test, spec)
        mean, std = _statistics(train_inputs["pixel_values"], spec)
    else:
        train_inputs, test_inputs, vocab_size, pad_token_id = _tokens(train, test, spec, tokenizer)
    logger.info(
        "%s: %d train and %d test rows, %d classes, %s",
        *(spec.name, len(train_labels), len(test_labels), len(names)),
        ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in train_inputs.items()),
    )
    return Corpus(
        name=spec.name,
        task=found.task,
        classes=names,
        train=Table(train_inputs, train_labels),
        test=Table(test_inputs, test_labels),
        columns={name: _column(values) for name, values in train.columns.items()},
        mean=mean,
        std=std,
        vocab_size=vocab_size,
        pad_token_id=pad_token_id,
    )


def _check(spec: DatasetSpec) -> None:
    if spec.kind not in _READERS:
        raise UserError(f"dataset.kind={spec.kind!r} is unknown: choose one of {', '.join(_READERS)}.")
    if spec.kind != "digits" and not spec.path:
        raise UserError(f"dataset.path is missing: a data set of kind {spec.kind} needs one.")
    if spec.channels not in (None, 1, 3):
        raise UserError(f"dataset.channels={spec.channels} must be 1, 3 or null.")
    if spec.image_size is not None and spec.image_size < 1:
        raise UserError(f"dataset.image_size={spec.image_size} must be at least 1.")
    if spec.max_tokens < 2:
        raise UserError(f"dataset.max_tokens={spec.max_tokens} must be at least 2.")
    if not 0 <= spec.test_fraction < 1:
        raise UserError(f"dataset.test_fraction={spec.test_fraction} must be at least 0 and below 1.")
    if spec.limit is not None and spec.limit < 1:
        raise UserError(f"dataset.limit={spec.limit} must be at least 1 or null.")


# ---- readers: one for each kind of source ----


def _read_digits(spec: DatasetSpec) -> _Found:
    """scikit-learn's 1797 digits. Their 0..16 become 0..255 as value * 255 // 16."""
    from sklearn.datasets import load_digits  # lazy: only this reader needs scikit-learn

    images, targets = load_digits(return_X_y=True)
    pixels = (images.astype(np.int64) * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)
    labels: list[str | None] = [str(target) for target in targets]
    origins = [f"digit {row}" for row in range(len(labels))]
    return _Found("image", _Rows(list(pixels), labels, {}, origins), None)


def _read_images(spec: DatasetSpec) -> _Found:
    """An image folder: [split/][domain/]class/file."""
    root = _existing(spec)
    if not root.is_dir():
        raise UserError(f"dataset.path={spec.path} is a file: an image data set is a folder.")
    if not (root / spec.train_split).is_dir():
        if (root / spec.test_split).is_dir():
            raise UserError(
                f"{root} has a folder {spec.test_split!r} but no {spec.train_split!r}: "
                "set dataset.train_split to the name of the train folder."
            )
        return _Found("image", _image_tree(root), None)
    train, test = _image_tree(root / spec.train_split), None
    if (root / spec.test_split).is_dir():
        test = _image_tree(root / spec.test_split)
    return _Found("image", train, test)


def _image_tree(root: Path) -> _Rows:
    """Images under class/ or domain/class/, whichever the folder turns out to have."""
    tops = _subfolders(root)
    classes = [(None, folder) for folder in tops if _image_files(folder)]
    domains = [(top, folder) for top in tops for folder in _class_folders(top)]
    if classes and domains:
        raise UserError(
            f"{root} mixes two layouts: {classes[0][1].name} holds images, {domains[0][0].name} "
            "holds folders of images; use either class/image or domain/class/image throughout."
        )
    if not classes and not domains:
        raise UserError(
            f"No images found in {root}: expected class/image, domain/class/image, or these below "
            "a train and a test folder (dataset.train_split, dataset.test_split)."
        )
    layout = "domain/class" if domains else "class"
    logger.info("%s: image folder with layout %s/image", root, layout)

    rows = _Rows([], [], {"domain": []} if domains else {}, [])
    for domain, folder in domains or classes:
        files = _image_files(folder)
        rows.content += files
        rows.labels += [folder.name] * len(files)
        rows.origins += [str(file) for file in files]
        if domain is not None:
            rows.columns["domain"] += [domain.name] * len(files)
    return rows


def _class_folders(domain: Path) -> list[Path]:
    folders = _subfolders(domain)
    # Office-31 has one more folder on the way: amazon/images/backpack/frame_0001.jpg.
    if [folder.name for folder in folders] == ["images"] and not _image_files(folders[0]):
        folders = _subfolders(folders[0])
    return [folder for folder in folders if _image_files(folder)]


def _subfolders(folder: Path) -> list[Path]:
    # Hidden folders and macOS' __MACOSX hold no data.
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] not in "._")


def _image_files(folder: Path) -> list[Path]:
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".")
    )


def _read_parquet(spec: DatasetSpec) -> _Found:
    """Hugging Face parquet files, named by split or one a domain."""
    return _read_tables(spec, (".parquet",), _parquet_frame)


def _read_text(spec: DatasetSpec) -> _Found:
    """CSV, TSV or JSON lines, named by split, with a split column, or one a domain."""
    suffixes = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES))
    return _read_tables(spec, suffixes, _text_frame)


def _read_hub(spec: DatasetSpec) -> _Found:
    """A data set by its name on the Hugging Face hub."""
    name, _, config = str(spec.path).partition(":")
    try:
        splits: Any = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"Could not load {spec.path!r} from the Hugging Face hub ({_first_line(error)}): check "
            "the name and the network, or use files with dataset.kind=parquet and dataset.path."
        ) from error
    if spec.train_split not in splits:
        raise UserError(
            f"{spec.path} has no split {spec.train_split!r}: "
            f"set dataset.train_split to one of {', '.join(splits)}."
        )

    def frame(split: str) -> _Frame:
        part = splits[split]
        return _arrow_frame(part.with_format("arrow")[:], part.features, split, Path())

    test = frame(spec.test_split) if spec.test_split in splits else None
    return _from_frames(spec, frame(spec.train_split), test)


def _read_tables(spec: DatasetSpec, suffixes: tuple[str, ...], read: Callable[[Path], _Frame]) -> _Found:
    root = _existing(spec)
    files = [root]
    if root.is_dir():
        files = sorted(
            file for file in root.rglob("*") if file.name.endswith(suffixes) and not file.name.startswith(".")
        )
    elif not root.name.endswith(suffixes):
        raise UserError(f"dataset.path={spec.path} is not a {' or '.join(suffixes)} file.")
    if not files:
        raise UserError(f"No {' or '.join(suffixes)} file found in {root}: check dataset.path.")

    train_files = [file for file in files if _belongs(file, root, spec.train_split)]
    test_files = [file for file in files if _belongs(file, root, spec.test_split)]
    if train_files:
        ignored = [file.name for file in files if file not in train_files + test_files]
        if ignored:
            logger.info("%s: not read, neither train nor test: %s", root, ", ".join(ignored))
        test = _joined([read(file) for file in test_files]) if test_files else None
        return _from_frames(spec, _joined([read(file) for file in train_files]), test)
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
    return _from_frames(spec, *_by_split_column(spec, _joined(frames)))


def _existing(spec: DatasetSpec) -> Path:
    path = Path(str(spec.path)).expanduser()
    if not path.exists():
        raise UserError(f"dataset.path={spec.path} does not exist (looked at {path.absolute()}).")
    return path


def _stem(file: Path) -> str:
    return file.name.split(".")[0]


def _belongs(file: Path, root: Path, split: str) -> bool:
    """Whether a file is a split's by name: train.csv, train-00000-of-00002.parquet, train/0.csv."""
    if re.match(rf"{re.escape(split)}([-_]|$)", _stem(file)):
        return True
    return file != root and split in file.relative_to(root).parts[:-1]


# ---- tables: from files to rows ----


def _parquet_frame(file: Path) -> _Frame:
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as parquet ({error}).") from error
    features = datasets.Features.from_arrow_schema(table.schema)
    return _arrow_frame(table, features, file.name, file.parent)


def _arrow_frame(table: pyarrow.Table, features: datasets.Features, origin: str, folder: Path) -> _Frame:
    frame = _Frame({}, [f"row {row} of {origin}" for row in range(table.num_rows)])
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


def _text_frame(file: Path) -> _Frame:
    is_json = ".jsonl" in file.suffixes
    return _json_frame(file) if is_json else _csv_frame(file)


def _csv_frame(file: Path) -> _Frame:
    separator = "\t" if ".tsv" in file.suffixes else ","
    try:
        # As text throughout: "007" stays an id, and a class may be called "NA".
        table = pandas.read_csv(file, sep=separator, dtype=str, keep_default_na=False)
    except (ValueError, OSError, csv.Error, EOFError, zlib.error) as error:
        raise UserError(f"{file} cannot be read as a table ({_first_line(error)}).") from error
    cells = {str(name): table[name].tolist() for name in table.columns}
    return _Frame(cells, [f"row {row} of {file.name}" for row in range(len(table))])


def _json_frame(file: Path) -> _Frame:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        lines = io.StringIO(data.decode()).readlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as JSON lines ({_first_line(error)}).") from error
    records: list[dict[str, Any]] = []
    origins = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"Line {number} of {file} is not valid JSON ({error}).") from error
        if not isinstance(record, dict):
            raise UserError(f"Line {number} of {file} is not a JSON object.")
        records.append(record)
        origins.append(f"line {number} of {file.name}")
    names = dict.fromkeys(name for record in records for name in record)
    return _Frame({name: [record.get(name) for record in records] for name in names}, origins)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _joined(frames: list[_Frame]) -> _Frame:
    """Several files below one another, with the columns that all of them have."""
    first = frames[0]
    common = [name for name in first.cells if all(name in frame.cells for frame in frames)]
    return _Frame(
        {name: [value for frame in frames for value in frame.cells[name]] for name in common},
        [origin for frame in frames for origin in frame.origins],
        {name for name in first.images if name in common},
        {
            name: names
            for name, names in first.class_names.items()
            if all(frame.class_names.get(name) == names for frame in frames)
        },
    )


def _by_split_column(spec: DatasetSpec, frame: _Frame) -> tuple[_Frame, _Frame | None]:
    """(train, test) by a column named split, where there is one."""
    if "split" not in frame.cells:
        return frame, None
    values = frame.cells.pop("split")

    def part(wanted: str) -> _Frame:
        rows = [row for row, value in enumerate(values) if value == wanted]
        cells = {name: [cell[row] for row in rows] for name, cell in frame.cells.items()}
        return _Frame(cells, [frame.origins[r] for r in rows], frame.images, frame.class_names)

    train, test = part(spec.train_split), part(spec.test_split)
    if not train.origins:
        have = ", ".join(sorted({str(value) for value in values}))
        raise UserError(
            f"No row has {spec.train_split!r} in its column 'split': "
            f"set dataset.train_split to one of {have}."
        )
    ignored = len(values) - len(train.origins) - len(test.origins)
    if ignored:
        logger.info("%d rows not read: their split is neither train nor test", ignored)
    return train, test if test.origins else None


def _from_frames(spec: DatasetSpec, train: _Frame, test: _Frame | None) -> _Found:
    content, is_image = _content_column(spec, train)
    guesses = ("label", "labels", "class")
    label = _pick(train, spec.label_column, "dataset.label_column", guesses)
    absent = [] if test is None else [name for name in (content, label) if name not in test.cells]
    if absent:
        raise UserError(
            f"The test rows have no column {absent[0]!r}, which the train rows have: "
            "add it or set dataset.test_split to another split."
        )

    def rows(frame: _Frame) -> _Rows:
        others = {
            name: values
            for name, values in frame.cells.items()
            if name not in (content, label) and name not in frame.images and _is_scalar(values)
        }
        labels = [
            _label(value, label, origin)
            for value, origin in zip(frame.cells[label], frame.origins, strict=True)
        ]
        found = frame.cells[content]
        if not is_image:
            found = [str(text) if text is not None and str(text).strip() else None for text in found]
        return _Rows(found, labels, others, frame.origins)

    test_rows = None if test is None else rows(test)
    task = "image" if is_image else "text"
    return _Found(task, rows(train), test_rows, train.class_names.get(label))


def _content_column(spec: DatasetSpec, frame: _Frame) -> tuple[str, bool]:
    """The column that the model reads, and whether it holds images."""
    if spec.image_column is None and (spec.text_column is not None or not frame.images):
        return _pick(frame, spec.text_column, "dataset.text_column", ("text", "sentence")), False
    column = _pick(frame, spec.image_column, "dataset.image_column", sorted(frame.images))
    if column not in frame.images:
        raise UserError(f"dataset.image_column={column!r} holds no images.")
    return column, True


def _pick(frame: _Frame, wanted: str | None, option: str, guesses: Iterable[str]) -> str:
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
    if value is None or value != value or value == "":  # a missing number is the one unlike itself
        return None
    if isinstance(value, list | dict):
        raise UserError(
            f"Column {column!r} holds more than one value in {origin}: "
            "set dataset.label_column to a column with one label a row."
        )
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_scalar(values: list[Any]) -> bool:
    return not any(isinstance(value, list | dict | bytes) for value in values)


def _column(values: list[Any]) -> np.ndarray:
    """Whole numbers as such, all else as text with "" where missing."""
    if all(type(value) is int for value in values):
        return np.array(values, dtype=np.int64)
    # As objects: one long cell would widen a numpy text array for every row.
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


# ---- classes and splits ----


def _clean(rows: _Rows, spec: DatasetSpec, split: str) -> _Rows:
    """Only rows with content and a label, and of the classes asked for."""
    whole = [
        content is not None and label is not None
        for content, label in zip(rows.content, rows.labels, strict=True)
    ]
    if not any(whole):
        raise UserError(
            f"None of the {len(whole)} rows of {split!r} has both content and a label: check "
            "dataset.label_column, or set the split's name to one with labels."
        )
    if not all(whole):
        dropped = len(whole) - sum(whole)
        logger.warning("%s: dropped %d of %d rows without content or label", split, dropped, len(whole))
        rows = rows.where(whole)
    if spec.keep_classes is not None:
        kept = [label in spec.keep_classes for label in rows.labels]
        logger.info("%s: kept %d of %d rows by dataset.keep_classes", split, sum(kept), len(kept))
        rows = rows.where(kept)
        if not rows.content:
            raise UserError(f"No row of {split!r} is of a class in dataset.keep_classes.")
    return rows


def _class_order(
    spec: DatasetSpec,
    train: _Rows,
    class_names: tuple[str, ...] | None,
    agreed: tuple[str, ...] | None,
) -> tuple[str, ...]:
    present = {label for label in train.labels if label is not None}
    if agreed is not None:
        names = tuple(agreed)
    elif spec.keep_classes is not None:
        names = tuple(spec.keep_classes)
        absent = [name for name in names if name not in present]
        if absent:
            raise UserError(f"dataset.keep_classes names {absent[0]!r}, which no train row has.")
    elif class_names is not None:
        names = class_names
    else:
        # Numbers in order of size: "10" comes after "9".
        numeric = all(re.fullmatch(r"-?\d+", label) for label in present)
        names = tuple(sorted(present, key=int) if numeric else sorted(present))
    if len(names) < 2:
        raise UserError(
            f"The train rows have {len(names)} class ({', '.join(names)}): at least 2 are needed; "
            "check dataset.path and dataset.label_column."
        )
    if len(set(names)) != len(names):
        raise UserError(f"The class names are not distinct: {', '.join(names)}.")
    return names


def _number(rows: _Rows, names: tuple[str, ...], agreed: tuple[str, ...] | None) -> torch.Tensor:
    number = {name: position for position, name in enumerate(names)}
    for label, origin in zip(rows.labels, rows.origins, strict=True):
        if label not in number:
            among = "the agreed classes" if agreed is not None else "the classes of the train rows"
            raise UserError(
                f"Label {label!r} of {origin} is not among {among} ({_shown(names)}): "
                "correct it or leave the row out."
            )
    return torch.tensor([number[str(label)] for label in rows.labels], dtype=torch.int64)


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _hold_out(rows: _Rows, spec: DatasetSpec) -> tuple[_Rows, _Rows]:
    """(train, test), the test rows drawn class by class.

    scikit-learn's stratified split refuses a class with one row; here such a row trains.
    """
    rng = np.random.default_rng(spec.split_seed)
    labels = np.array(rows.labels, dtype=object)
    in_test = np.zeros(len(labels), dtype=bool)
    for label in sorted({str(label) for label in rows.labels}):
        members = rng.permutation(np.flatnonzero(labels == label))
        if spec.test_fraction > 0 and len(members) > 1:
            share = max(1, round(spec.test_fraction * len(members)))
            in_test[members[: min(share, len(members) - 1)]] = True
    return rows.take(np.flatnonzero(~in_test)), rows.take(np.flatnonzero(in_test))


def _limited(rows: _Rows, labels: torch.Tensor, spec: DatasetSpec) -> tuple[_Rows, torch.Tensor]:
    order = np.random.default_rng(spec.split_seed).permutation(len(labels))
    index = np.sort(order[: spec.limit])
    return rows.take(index), labels[index]


# ---- images ----


def _images(
    train: _Rows, test: _Rows, spec: DatasetSpec
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if spec.image_size is not None:
        size = (spec.image_size, spec.image_size)
    else:
        size = _open(train.content[0], train.origins[0]).size
    pixels, grey = _decode(train, size, spec)
    test_pixels, test_grey = _decode(test, size, spec)
    if spec.channels is None and grey and test_grey:
        pixels, test_pixels = pixels[:, :1].copy(), test_pixels[:, :1].copy()
    return (
        {"pixel_values": torch.from_numpy(pixels)},
        {"pixel_values": torch.from_numpy(test_pixels)},
    )


def _decode(rows: _Rows, size: tuple[int, int], spec: DatasetSpec) -> tuple[np.ndarray, bool]:
    """All images as one array (n, c, h, w), and whether every one of them was grey."""
    count, (width, height) = len(rows.content), size
    channels = spec.channels or 3
    pixels = np.empty((count, channels, height, width), dtype=np.uint8)
    grey = np.empty(count, dtype=bool)

    def work(chunk: np.ndarray) -> None:
        for row in chunk:
            image = _open(rows.content[row], rows.origins[row])
            grey[row] = image.mode == "L"
            wanted = "L" if channels == 1 else "RGB"
            if image.mode != wanted:
                image = image.convert(wanted)
            if image.size != size:
                if spec.image_size is None:
                    raise UserError(
                        f"{rows.origins[row]} is {image.width}x{image.height} pixels where others "
                        f"are {width}x{height}: set dataset.image_size to bring all to one size."
                    )
                image = image.resize(size, Image.Resampling.BICUBIC)
            array = np.asarray(image)  # (h, w) or (h, w, 3)
            pixels[row] = array if channels == 1 else array.transpose(2, 0, 1)

    # Threads help because Pillow decodes outside the interpreter lock; chunks, because one task an
    # image would cost more than a small image itself.
    workers = os.cpu_count() or 1
    chunks = np.array_split(np.arange(count), max(1, min(4 * workers, count)))
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, chunks):
            pass
    return pixels, bool(grey.all())


def _open(item: Any, origin: str) -> Image.Image:
    """An image, loaded, with 8 bits a channel."""
    if isinstance(item, np.ndarray):
        return Image.fromarray(item)
    try:
        image = Image.open(io.BytesIO(item) if isinstance(item, bytes) else item)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"Cannot read the image {origin} ({_first_line(error)}).") from error
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit pixels, as radiographs have, to white.
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise UserError(f"The image {origin} has floating-point pixels: save it with 8 or 16 bits.")
    return image.convert("L") if image.mode in ("1", "LA") else image


def _statistics(pixels: torch.Tensor, spec: DatasetSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels in 0..1, given or measured."""
    channels = pixels.shape[1]
    for option, given in (("mean", spec.mean), ("std", spec.std)):
        if given is not None and len(given) != channels:
            raise UserError(
                f"dataset.{option} has {len(given)} values but the images have {channels} channels."
            )
    if spec.std is not None and min(spec.std) <= 0:
        raise UserError(f"dataset.std={list(spec.std)} must be above 0 in every channel.")
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(channels):
        # Counting the 256 values is exact and needs no float copy of the pixels.
        shares = torch.bincount(pixels[:, channel].flatten(), minlength=256).double()
        shares /= shares.sum()
        mean = (shares * levels).sum()
        std = (shares * (levels - mean) ** 2).sum().sqrt()
        means.append(mean.item())
        stds.append(std.item() if std > 0 else 1.0)  # a blank channel: nothing to scale
    return tuple(spec.mean or means), tuple(spec.std or stds)


# ---- text ----


def _tokens(
    train: _Rows, test: _Rows, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]:
    texts = train.content + test.content
    if tokenizer is None:
        tokenizer = ByT5Tokenizer()
        # A character is at least a byte, so no more than these can matter.
        texts = [text[: spec.max_tokens] for text in texts]
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("The tokenizer has neither a padding nor an end token: give it one.")
        tokenizer.pad_token = tokenizer.eos_token
    # In one call, so that train and test are padded to the same width.
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=spec.max_tokens,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    inputs = {name: encoded[name].to(torch.int64) for name in ("input_ids", "attention_mask")}
    split = len(train.content)
    return (
        {name: value[:split].clone() for name, value in inputs.items()},
        {name: value[split:].clone() for name, value in inputs.items()},
        len(tokenizer),
        int(tokenizer.pad_token_id),
    )


_READERS: dict[str, Callable[[DatasetSpec], _Found]] = {
    "digits": _read_digits,
    "images": _read_images,
    "parquet": _read_parquet,
    "text": _read_text,
    "hub": _read_hub,
}
