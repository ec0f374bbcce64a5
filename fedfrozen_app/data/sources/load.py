"""Reading data sets: from a folder, a file or a name to tensors in memory.

Every reader gives the same plain rows (content, class name, other columns). From there on one path
numbers the classes, holds out a test set where the data bring none, and decodes or tokenises once.
A site of a deployed federation calls the same :func:`load` on its own folder, with the classes that
all sites have agreed on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from fedfrozen_app.data.sources.digits import read_digits
from fedfrozen_app.data.sources.images import decode_images, pixel_statistics, read_images
from fedfrozen_app.data.sources.rows import DatasetSpec, Found, Rows
from fedfrozen_app.data.sources.tables import read_hub, read_parquet, read_text
from fedfrozen_app.data.sources.text import tokenise
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.errors import UserError

logger = logging.getLogger(__name__)

_READERS: dict[str, Callable[[DatasetSpec], Found]] = {
    "digits": read_digits,
    "images": read_images,
    "parquet": read_parquet,
    "text": read_text,
    "hub": read_hub,
}


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
        train_inputs, test_inputs = decode_images(train, test, spec)
        mean, std = pixel_statistics(train_inputs["pixel_values"], spec)
    else:
        train_inputs, test_inputs, vocab_size, pad_token_id = tokenise(train, test, spec, tokenizer)
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


def _column(values: list[Any]) -> np.ndarray:
    """Whole numbers as such, all else as text with "" where missing."""
    if all(type(value) is int for value in values):
        return np.array(values, dtype=np.int64)
    # As objects: one long cell would widen a numpy text array for every row.
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


def _clean(rows: Rows, spec: DatasetSpec, split: str) -> Rows:
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
    train: Rows,
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


def _number(rows: Rows, names: tuple[str, ...], agreed: tuple[str, ...] | None) -> torch.Tensor:
    number = {name: position for position, name in enumerate(names)}
    for label, origin in zip(rows.labels, rows.origins, strict=True):
        if label not in number:
            among = "the agreed classes" if agreed is not None else "the classes of the train rows"
            raise UserError(
                f"Label {label!r} of {origin} is not among {among} ({shown(names)}): "
                "correct it or leave the row out."
            )
    return torch.tensor([number[str(label)] for label in rows.labels], dtype=torch.int64)


def shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _hold_out(rows: Rows, spec: DatasetSpec) -> tuple[Rows, Rows]:
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


def _limited(rows: Rows, labels: torch.Tensor, spec: DatasetSpec) -> tuple[Rows, torch.Tensor]:
    order = np.random.default_rng(spec.split_seed).permutation(len(labels))
    index = np.sort(order[: spec.limit])
    return rows.take(index), labels[index]
