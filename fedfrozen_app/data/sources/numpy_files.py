"""Rows that are numbers already, in NumPy files, for tables of millions of rows (`dataset=arrays`).

    FOLDER/train/numbers.npy   (rows, columns) of float32 or float64
    FOLDER/train/labels.npy    (rows,) of whole numbers from 0
    FOLDER/train/NAME.npy      (rows,) a column to divide by, such as client.npy: whole numbers or texts
    FOLDER/test/...            the same for the test rows

The numbers are used as they are: scale them beforehand. They stay in their files and are read when a client
is trained, so that a run does not need the memory for all of them. No Python object is made for a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.preprocessing import Numeric, Preprocessing
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, existing
from fedfrozen_app.data.table import Corpus, Table

NUMBERS, LABELS = "numbers", "labels"
AT_ONCE = 1 << 20  # rows that are checked at a time


class ArrayReader:
    """What `dataset.kind=arrays` reads: a corpus, without rows as Python objects before it."""

    tasks = ("classification",)
    needs_path = True

    def __call__(self, spec: DatasetSpec) -> Found:
        raise UserError(
            "dataset=arrays holds numbers without their columns' words, which this needs: give the table "
            "itself, with dataset=table."
        )

    def corpus(self, spec: DatasetSpec, classes: tuple[str, ...] | None) -> Corpus:
        """`classes`: those that all sites have agreed on."""
        root = existing(spec)
        if spec.limit is not None:
            raise UserError("dataset.limit is not for dataset=arrays: write files with fewer rows.")
        parts = [_split(root / split) for split in (spec.train_split, spec.test_split)]
        (numbers, labels, columns), (test_numbers, test_labels, test_columns) = parts
        if numbers.shape[1] != test_numbers.shape[1]:
            raise UserError(
                f"{root}: the train rows have {numbers.shape[1]} columns and the test rows "
                f"{test_numbers.shape[1]}: write the same ones."
            )
        count = 1 + int(max(labels.max(), test_labels.max()))
        names = classes or tuple(map(str, range(max(count, 2))))
        if count > len(names):
            raise UserError(f"{root} has the label {count - 1}, and there are {len(names)} classes.")
        width = numbers.shape[1]
        scales = tuple(Numeric(f"x{column}", 0.0, 0.0, 1.0) for column in range(width))
        sizes = {spec.train_split: len(labels), spec.test_split: len(test_labels)}
        return Corpus(
            name=spec.name,
            task="table",
            classes=names,
            train=_table(numbers, labels),
            test=_table(test_numbers, test_labels),
            columns=columns,
            test_columns=test_columns,
            mean=(),
            std=(),
            vocab_size=0,
            pad_token_id=0,
            strata=labels,
            test_strata=test_labels,
            stratum_names=names,
            units=np.arange(len(labels)),
            test_units=np.arange(len(test_labels)),
            preprocessing=Preprocessing(scales, ()),
            account={
                "files": [{"file": f"{split}/{NUMBERS}.npy", "rows": rows} for split, rows in sizes.items()],
                "splits": {split: {"read": rows, "dropped": {}} for split, rows in sizes.items()},
                "warnings": [],
            },
        )


read_arrays = ArrayReader()


def _split(folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(numbers, labels, columns) of one folder; the numbers stay in their file."""
    numbers, labels = _read(folder / f"{NUMBERS}.npy"), _read(folder / f"{LABELS}.npy")
    if numbers.ndim != 2 or numbers.dtype not in (np.float32, np.float64) or not numbers.size:
        raise UserError(
            f"{folder / NUMBERS}.npy holds {numbers.dtype} {numbers.shape}: write float32 or float64 (rows, "
            "columns)."
        )
    if labels.shape != (len(numbers),) or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
        raise UserError(
            f"{folder / LABELS}.npy must hold a whole number from 0 for each of the "
            f"{counted(len(numbers), 'row')} of {NUMBERS}.npy, and holds {labels.dtype} {labels.shape}."
        )
    for first in range(0, len(numbers), AT_ONCE):
        if not np.isfinite(numbers[first : first + AT_ONCE]).all():
            raise UserError(f"{folder / NUMBERS}.npy has a value that is no finite number: fill it in.")
    columns = {}
    for path in sorted(folder.glob("*.npy")):
        if path.stem not in (NUMBERS, LABELS):
            columns[path.stem] = _column(path, len(numbers))
    return numbers, np.asarray(labels, dtype=np.int64), columns


def _column(path: Path, rows: int) -> np.ndarray:
    values = _read(path)
    if values.shape != (rows,) or values.dtype.kind not in "iuU":
        raise UserError(
            f"{path} must hold a whole number or a text for each of {counted(rows, 'row')}, and holds "
            f"{values.dtype} {values.shape}."
        )
    return np.asarray(values) if values.dtype.kind in "iu" else values.astype(object)


def _read(path: Path) -> np.ndarray:
    """Mapped, not read: what is written to it stays in this process."""
    try:
        found: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: dataset=arrays needs numbers.npy and labels.npy.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no NumPy file ({error}): write it with numpy.save.") from error
    return found


def _table(numbers: np.ndarray, labels: np.ndarray) -> Table:
    inputs: dict[str, Any] = {
        "numbers": torch.from_numpy(numbers),
        "categories": torch.zeros(len(labels), 0, dtype=torch.int64),
    }
    return Table(inputs, torch.from_numpy(labels))
