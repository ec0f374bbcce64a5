"""Rows given as Python objects: pandas, numpy, torch and Hugging Face data sets, and dictionaries of columns.

Each becomes the same plain columns as a file's, so that all that follows is the same: which column is read,
missing values, near-equal labels, the account of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from torch.utils import data as torch_data

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import file_read
from fedfrozen_app.data.sources.array_pixels import KINDS, as_pixels
from fedfrozen_app.data.sources.parquet_tables import arrow_frame
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Frame
from fedfrozen_app.data.sources.tabular import found_in

TABLES = (datasets.Dataset, pd.DataFrame, torch_data.Dataset)
COLUMNS = (list, tuple, np.ndarray, pd.Series, torch.Tensor)
LABELS, SPLITS = {"label", "labels", "class"}, {"train", "test", "validation"}
FORMS = (
    "a pandas DataFrame, a datasets.Dataset, a torch Dataset, (inputs, labels) as arrays, a dictionary of "
    "columns, or a dictionary of these by split"
)

AS_FILE = (
    'A table of numbers and categories is read from a file: frame.to_csv("rows.csv", index=False), then '
    '"dataset=table", "dataset.path=rows.csv", "dataset.label_column=COLUMN".'
)


@dataclass(frozen=True)
class GivenRows:
    """A reader, as those of files are: what a run asks for by `dataset.kind`."""

    frames: dict[str, Frame]  # by split; one alone has no name
    what: str  # "a pandas DataFrame of 80 rows"

    tasks = ("classification", "multilabel")
    needs_path = False

    def __call__(self, spec: DatasetSpec) -> Found:
        for split, frame in self.frames.items():
            name = f"{split}, given from Python".removeprefix(", ")
            file_read(name, what=self.what, rows=len(frame.origins), columns=list(frame.cells))
        # Copies of the tables: reading one takes its column `split` out.
        frames = {name: replace(frame, cells=dict(frame.cells)) for name, frame in self.frames.items()}
        first = next(iter(frames.values()))
        named = spec.text_column or spec.image_column
        if named is None and not first.images and not {"text", "sentence"} & first.cells.keys():
            have = ", ".join(first.cells)
            raise UserError(f"Set dataset.text_column to the column to use: the data have {have}. {AS_FILE}")
        return found_in(spec, frames, "the data set")

    @property
    def has_pictures(self) -> bool:
        return any(frame.images for frame in self.frames.values())

    @property
    def digest(self) -> str:
        """The same for the same rows, whatever form they were given in."""
        found = hashlib.sha256()
        for split, frame in self.frames.items():
            for name, cells in frame.cells.items():
                found.update(f"{split}\0{name}\0{frame.class_names.get(name)}\0".encode())
                for cell in cells:
                    content = _bytes_of(cell)
                    found.update(len(content).to_bytes(8, "little"))
                    found.update(content)
        return found.hexdigest()


def _bytes_of(cell: Any) -> bytes:
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, Path):  # a picture that a datasets.Dataset points to
        return cell.read_bytes()
    if isinstance(cell, np.ndarray):
        return f"{cell.dtype}{cell.shape}".encode() + cell.tobytes()
    return f"{type(cell).__name__}:{cell}".encode()


def is_table(thing: Any) -> bool:
    """Whether it is one table of rows."""
    return isinstance(thing, TABLES) or _is_pair(thing) or _is_columns(thing)


def _is_pair(thing: Any) -> bool:
    return (
        isinstance(thing, (tuple, list))
        and len(thing) == 2
        and all(isinstance(one, COLUMNS) for one in thing)
    )


def _is_columns(thing: Any) -> bool:
    return (
        isinstance(thing, Mapping) and bool(thing) and all(isinstance(one, COLUMNS) for one in thing.values())
    )


def _is_splits(thing: Any) -> bool:
    """Names of columns may also be those of splits: two arrays in each are inputs and labels, not cells."""
    if not isinstance(thing, Mapping) or not thing:
        return False
    if _is_columns(thing):
        pairs = all(_is_pair(one) for one in thing.values()) and not LABELS & thing.keys()
        return pairs or SPLITS.issuperset(thing)
    return any(is_table(one) for one in thing.values())


def given_rows(thing: Any) -> GivenRows:
    """`UserError` for what holds no rows with labels."""
    if _is_splits(thing):
        frames = {str(name): _frame(part, str(name)) for name, part in thing.items()}
        what = " and ".join(f"{_what(part, frames[str(name)])} as {name}" for name, part in thing.items())
        return GivenRows(frames, what)
    frame = _frame(thing, "train")
    return GivenRows({"": frame}, _what(thing, frame))


def _what(thing: Any, frame: Frame) -> str:
    kinds = {pd.DataFrame: "a pandas DataFrame", datasets.Dataset: "a datasets.Dataset"}
    named = next((name for kind, name in kinds.items() if isinstance(thing, kind)), "")
    if not named:
        torch_kind = f"a torch Dataset ({type(thing).__name__})"
        named = torch_kind if isinstance(thing, torch_data.Dataset) else "arrays"
    return f"{named} of {counted(len(frame.origins), 'row')}"


def _frame(thing: Any, split: str) -> Frame:
    _refuse(thing, split)
    if isinstance(thing, datasets.Dataset):
        return arrow_frame(thing.with_format("arrow")[:], thing.features, split, Path())
    if isinstance(thing, torch_data.Dataset):
        return _of_torch(thing, split)
    if isinstance(thing, pd.DataFrame):
        names = [str(name) for name in thing.columns]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"The DataFrame has the column {twice!r} twice: rename one of them.")
        return _of_columns({name: thing.iloc[:, place] for place, name in enumerate(names)}, split)
    if _is_pair(thing):
        inputs, labels = thing
        column = "image" if _holds_pictures(inputs) else "text"
        return _of_columns({column: inputs, "label": labels}, split)
    return _of_columns({str(name): values for name, values in thing.items()}, split)


def _refuse(thing: Any, split: str) -> None:
    """What cannot be read as rows, each with the sentence that says what to give instead."""
    where = "" if split == "train" else f"The split {split!r}: "
    if isinstance(thing, (datasets.IterableDataset, torch_data.IterableDataset)):
        raise UserError(
            f"{where}a streamed data set has no rows by number, which are dealt to the clients before "
            "training: give a Dataset that holds its rows."
        )
    if isinstance(thing, torch_data.DataLoader):
        raise UserError(f"{where}a DataLoader is already in batches: give its data set, loader.dataset.")
    if isinstance(thing, (np.ndarray, torch.Tensor, pd.Series)):
        raise UserError(
            f"{where}one {type(thing).__name__} has no labels: give (inputs, labels), or a dictionary of "
            'columns such as {"text": ..., "label": ...}.'
        )
    if isinstance(thing, list) and thing and isinstance(thing[0], Mapping):
        raise UserError(f"{where}a list of dictionaries is no table: give pandas.DataFrame(rows).")
    if isinstance(thing, Path):
        raise UserError(f'A file is named by "dataset=text", "dataset.path={thing}": leave the Path out.')
    if not is_table(thing):
        raise UserError(f"{where}{type(thing).__name__} holds no rows that can be read: give {FORMS}.")


def _of_columns(columns: Mapping[str, Any], split: str) -> Frame:
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"The columns of {split!r} have different numbers of rows ({sizes_text}): one for each row."
        )
    count = next(iter(sizes.values()), 0)
    if not count:
        raise UserError(f"The data set has no rows in {split!r}: give some.")
    frame = Frame({}, [f"row {row} of {split}" for row in range(count)])
    for name, values in columns.items():
        if isinstance(values, pd.Series) and isinstance(values.dtype, pd.CategoricalDtype):
            frame.class_names[name] = tuple(str(one) for one in values.cat.categories)
        if _holds_pictures(values):
            frame.cells[name] = as_pixels(values, name)
            frame.images.add(name)
        else:
            frame.cells[name] = _cells(values, name)
    return frame


def _holds_pictures(values: Any) -> bool:
    """By the number of dimensions, or by the first cell that is there."""
    if isinstance(values, (np.ndarray, torch.Tensor)) and values.ndim > 1:
        return values.ndim > 2
    if isinstance(values, torch.Tensor):
        return False
    first = next((one for one in values if one is not None and not _is_missing(one)), None)
    return isinstance(first, KINDS) and getattr(first, "ndim", 2) > 1


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _cells(values: Any, name: str) -> list[Any]:
    if isinstance(values, (np.ndarray, torch.Tensor)) and values.ndim == 2:
        raise UserError(
            f"The column {name!r} has {values.shape[1]} numbers in each row: fedfrozen reads texts, and "
            "pictures of shape (rows, height, width) or (rows, height, width, channels). Of labels give one "
            "for each row (argmax), or a list of names with dataset.task=multilabel. "
            f"{AS_FILE}"
        )
    if isinstance(values, pd.Series):
        missing = values.isna().tolist()
        values = [None if gone else one for one, gone in zip(values.tolist(), missing, strict=True)]
    elif isinstance(values, (np.ndarray, torch.Tensor)):
        values = values.tolist()
    return [_plain(one) for one in values]


def _plain(cell: Any) -> Any:
    """Numbers of numpy and torch as Python's; nested lists as they are."""
    if isinstance(cell, (np.generic, np.ndarray, torch.Tensor)):
        return cell.item() if getattr(cell, "ndim", 0) == 0 else cell.tolist()
    return list(cell) if isinstance(cell, tuple) else cell


# torch ----------------------------------------------------------------------------------------------------


def _of_torch(given: torch_data.Dataset[Any], split: str) -> Frame:
    """Read once, in order: what a transform draws at random is drawn once."""
    if not hasattr(given, "__len__"):
        raise UserError(f"The torch Dataset {type(given).__name__} has no len(): its rows cannot be dealt.")
    columns: dict[str, list[Any]] = {}
    for row in range(len(given)):
        for name, value in _item(given[row], type(given).__name__):
            columns.setdefault(name, []).append(value)
    names = _class_names(given)
    label = next((name for name in ("label", "labels", "class") if name in columns), "")
    frame = _of_columns(columns, split)
    if names and label and all(_is_place(one, names) for one in frame.cells[label]):
        frame.cells[label] = [names[one] for one in frame.cells[label]]
        frame.class_names[label] = tuple(names)
    return frame


def _item(item: Any, kind: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        yield from ((str(name), value) for name, value in item.items())
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        inputs, label = item
        yield ("text" if isinstance(inputs, str) else "image"), inputs
        yield "label", _plain(label)
    else:
        raise UserError(
            f"A row of the torch Dataset {kind} is {type(item).__name__}: give (input, label), or a "
            'dictionary such as {"text": ..., "label": ...}.'
        )


def _class_names(given: Any) -> Sequence[str]:
    """As torchvision's data sets name them; a Subset's are those of the whole."""
    while isinstance(given, torch_data.Subset):
        given = given.dataset
    found = getattr(given, "classes", None)
    is_names = isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found)
    return list(found) if is_names and found else []


def _is_place(label: Any, names: Sequence[str]) -> bool:
    return type(label) is int and 0 <= label < len(names)
