"""Reading data sets: from a folder, a file or a name to tensors in memory.

Every reader gives the same plain rows (content, class name, other columns). From there on one path
numbers the classes, holds out a test set where the data bring none, and decodes or tokenises once.
A site of a deployed federation calls the same :func:`load` on its own folder, with the classes that
all sites have agreed on. Readers are found by `dataset.kind` in the registry's group `datasets`: an installed
package may bring others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import accounting, dropped, warn
from fedfrozen_app.data.preprocessing import Preprocessing, read_statistics
from fedfrozen_app.data.sources.columns import cells_of
from fedfrozen_app.data.sources.images import decode_images, pixel_statistics
from fedfrozen_app.data.sources.labels import (
    class_order,
    clean,
    keep_classes,
    most_frequent,
    number,
    strata,
    stratum_numbers,
    unit_numbers,
)
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Reader, Rows
from fedfrozen_app.data.sources.text import Encoded, continuations, tag_words, tokenise
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.tasks.target import target_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Rows that are whole and of the classes asked for, parted into train and test, and their classes."""

    task: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    unit: str | None
    fields: tuple[str, ...] = ()  # of a table: the columns of each row's content
    settings: dict[str, Any] = field(default_factory=dict)  # of the target; see tasks/target.py
    account: dict[str, Any] = field(default_factory=dict)  # see data/account.py

    @property
    def reads(self) -> str:
        """What a model reads of a row: pictures, texts, or a table's cells."""
        return "table" if self.fields else "pictures" if target_of(self.task).reads_pictures else "texts"

    @cached_property
    def characters(self) -> int:
        """Of all texts."""
        return sum(map(_characters, chain(self.train.content, self.test.content)))


def _characters(item: Any) -> int:
    return len(item) if isinstance(item, str) else sum(map(len, item))


def read(spec: DatasetSpec) -> tuple[Found, str | None]:
    """The rows as they are, and the column whose values are never parted."""
    reader: Reader = registry.find("datasets", spec.kind)
    check_spec(spec, reader)
    found = reader(spec)
    return found, _unit_of(found, spec)


_ahead: dict[DatasetSpec, Prepared] = {}  # until they are asked for


def read_ahead(spec: DatasetSpec) -> None:
    """Prepare rows that the run will ask for, while it still imports what training needs: a mistake in the
    data is told seconds earlier."""
    _ahead[spec] = prepare(spec)


def prepare(
    spec: DatasetSpec,
    classes: tuple[str, ...] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Prepared:
    """The rows that a run deals with, not yet decoded, with an account of them; `classes` as for `load`,
    `settings` those of the target that all sites have agreed on."""
    if classes is None and spec in _ahead:
        return _ahead.pop(spec)
    with accounting() as account:
        prepared = _prepare(spec, classes)
        own = agreed_settings(spec) if settings is None else settings
        if own is None:
            own = target_of(prepared.task).chosen(prepared.train.labels, spec)
        prepared = replace(prepared, settings=dict(own))
    return replace(prepared, account=account.as_json())


def _prepare(spec: DatasetSpec, classes: tuple[str, ...] | None) -> Prepared:
    found, unit = read(spec)
    task = found.task
    train = clean(found.train, spec, spec.train_split, task)
    test = None if found.test is None else clean(found.test, spec, spec.test_split, task)
    if spec.top_labels is not None and task != "multilabel":
        raise UserError(
            f"dataset.top_labels={spec.top_labels} is for several labels a row: add dataset.task=multilabel, "
            "or leave it out."
        )
    if spec.top_labels is not None:
        frequent = classes or most_frequent(train, spec.top_labels)
        train = keep_classes(train, frequent, spec.train_split, task)
        test = None if test is None else keep_classes(test, frequent, spec.test_split, task)
        found = replace(found, class_names=frequent)
    names = class_order(spec, train, task, found.class_names, classes)
    if test is None:
        train, test = _hold_out(train, spec, task, unit)
    elif unit is not None:
        _warn_of_shared_units(train, test, unit)
    if spec.limit is not None:
        for split, part in ((spec.train_split, train), (spec.test_split, test)):
            dropped(split, "dataset.limit", max(len(part.content) - spec.limit, 0))
        train, test = _limited(train, spec), _limited(test, spec)
    return Prepared(task, train, test, names, unit, found.fields)


def agreed_settings(spec: DatasetSpec) -> dict[str, Any] | None:
    """The target's settings that `dataset.statistics` has."""
    return None if spec.statistics is None else read_statistics(spec.statistics).get("target")


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
    return decode(prepare(spec, classes), spec, tokenizer, classes)


def decode(
    rows: Prepared,
    spec: DatasetSpec,
    tokenizer: PreTrainedTokenizerBase | None,
    classes: tuple[str, ...] | None,
    preprocessing: Preprocessing | None = None,
) -> Corpus:
    """The second half of `load`: prepared rows as tensors. `preprocessing`: of a table, as all sites
    agreed."""
    task, names, train, test = rows.task, rows.classes, rows.train, rows.test
    if spec.chunks > 1 and task not in ("text", "multilabel"):
        raise UserError(
            "dataset.long_texts=chunks averages over a whole text, which entities and language models do "
            "not: leave it out, and set dataset.max_tokens."
        )
    train_labels, test_labels = (number(part, task, names, classes) for part in (train, test))
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocab_size = pad_token_id = 0
    if rows.reads == "table":
        cells, warnings = cells_of(spec, rows.fields, (train, test), preprocessing)
        preprocessing, (train_inputs, test_inputs) = cells
        known = rows.account.get("warnings", [])
        rows = replace(rows, account=rows.account | {"warnings": [*known, *warnings]})
    elif rows.reads == "pictures":
        train_inputs, test_inputs = decode_images(train, test, spec)
        mean, std = pixel_statistics(train_inputs["pixel_values"], spec)
    else:
        if task == "tokens":
            both = tag_words(train, test, train_labels + test_labels, spec, tokenizer)
            assert both.labels is not None
            train_labels, test_labels = both.labels.tensor_split([len(train.content)])
        elif task == "language":
            both = continuations(train, test, spec, tokenizer)
            assert both.labels is not None
            train_labels, test_labels = both.labels.tensor_split([len(train.content)])
        else:
            both = tokenise(train, test, spec, tokenizer)
        train_inputs, test_inputs = both.parts(len(train.content))
        vocab_size, pad_token_id = both.vocab_size, both.pad_token_id
        rows = replace(rows, account=rows.account | {"texts": _cut_texts(both, rows, spec)})
    target = f"{len(names)} classes" if names else f"{vocab_size} tokens" if vocab_size else task
    log_sizes(spec, (len(train_labels), len(test_labels)), target, train_inputs)
    return Corpus(
        name=spec.name,
        task=task,
        classes=names,
        train=Table(train_inputs, train_labels),
        test=Table(test_inputs, test_labels),
        mean=mean,
        std=std,
        vocab_size=vocab_size,
        pad_token_id=pad_token_id,
        preprocessing=preprocessing,
        settings=rows.settings,
        **_about(rows),
    )


def log_sizes(spec: DatasetSpec, rows: tuple[int, int], target: str, inputs: Mapping[str, Tensor]) -> None:
    shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in inputs.items())
    logger.info("%s: %d train and %d test rows, %s, %s", spec.name, *rows, target, shapes)


def _cut_texts(both: Encoded, rows: Prepared, spec: DatasetSpec) -> dict[str, Any]:
    """How many texts are longer than what the model reads; said, because their ends have no effect."""
    parts = {"train": both.cut[: len(rows.train.content)], "test": both.cut[len(rows.train.content) :]}
    cut, total = sum(both.cut), len(both.cut)
    most = f"{spec.chunks} x {spec.max_tokens}" if spec.chunks > 1 else f"{spec.max_tokens}"
    if cut:
        other = f"dataset.max_{'tokens' if spec.chunks == 1 else 'chunks'} reads more"
        if spec.chunks == 1 and rows.task in ("text", "multilabel"):
            other += ", dataset.long_texts=chunks too"
        logger.warning(
            "%d of %d texts (%.1f %%) are cut at %s tokens, and what follows has no effect: %s.",
            *(cut, total, 100 * cut / total, most, other),
        )
    counts = {split: {"cut": sum(part), "texts": len(part)} for split, part in parts.items()}
    return {"max_tokens": spec.max_tokens, "chunks": spec.chunks, "splits": counts}


def undecoded(rows: Prepared, name: str) -> Corpus:
    """All that dealing rows to clients needs to know: no picture is opened, no text made into tokens."""
    for part in (rows.train, rows.test):
        number(part, rows.task, rows.classes, None)  # or a sentence that names the label
    train, test = (
        Table({}, torch.zeros(len(part.content), dtype=torch.int64)) for part in (rows.train, rows.test)
    )
    none: dict[str, Any] = {"mean": (), "std": (), "vocab_size": 0, "pad_token_id": 0}
    return Corpus(name, rows.task, rows.classes, train, test, settings=rows.settings, **none, **_about(rows))


def _about(rows: Prepared) -> dict[str, Any]:
    """What a corpus knows of its rows beside their content: columns, and what they are dealt by."""
    found: dict[str, Any] = {"account": rows.account}
    target, mixes = target_of(rows.task, rows.settings), {}
    for part, prefix in ((rows.train, ""), (rows.test, "test_")):
        units = unit_numbers(part, rows.unit)
        mixes[prefix] = strata(part, target, units)
        columns = {name: _column(values) for name, values in part.columns.items()}
        found |= {f"{prefix}units": units, f"{prefix}columns": columns}
    names = target.stratum_names(rows.classes, chain(*mixes.values()))
    found |= {f"{prefix}strata": stratum_numbers(own, names) for prefix, own in mixes.items()}
    return found | {"stratum_names": names}


def _unit_of(found: Found, spec: DatasetSpec) -> str | None:
    if spec.unit_column is None:
        return found.unit
    if spec.unit_column not in found.train.columns:
        have = ", ".join(sorted(found.train.columns)) or "none"
        raise UserError(f"dataset.unit_column={spec.unit_column!r} is not a column: the data have {have}.")
    if found.test is not None and spec.unit_column not in found.test.columns:
        raise UserError(f"The test rows have no column {spec.unit_column!r} (dataset.unit_column): add it.")
    return spec.unit_column


def needs_path(kind: str) -> bool:
    """Whether data of this kind lie in files, or elsewhere outside of their reader."""
    return getattr(registry.find("datasets", kind), "needs_path", True)


def check_spec(spec: DatasetSpec, reader: Reader) -> None:
    if not spec.path and needs_path(spec.kind):
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
    tasks = getattr(reader, "tasks", ("classification",))
    if spec.task is not None and spec.task not in tasks:
        fit = " or ".join(tasks)
        raise UserError(f"dataset.task={spec.task} does not fit data of kind {spec.kind}: use {fit}.")


def _column(values: list[Any]) -> np.ndarray:
    """Whole numbers as such, all else as text with "" where missing."""
    if all(type(value) is int for value in values):
        return np.array(values, dtype=np.int64)
    # As objects: one long cell would widen a numpy text array for every row.
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


def _hold_out(rows: Rows, spec: DatasetSpec, task: str, unit: str | None) -> tuple[Rows, Rows]:
    """(train, test), the test rows drawn class by class, and with a unit all rows of it on one side.

    scikit-learn's stratified split refuses a class with one row; here such a row trains.
    """
    rng = np.random.default_rng(spec.split_seed)
    units = unit_numbers(rows, unit)
    _, first = np.unique(units, return_index=True)
    labels = np.array(strata(rows, target_of(task), units), dtype=object)[first]  # of each unit
    in_test = np.zeros(len(labels), dtype=bool)
    for label in sorted(set(labels)):
        members = rng.permutation(np.flatnonzero(labels == label))
        if spec.test_fraction > 0 and len(members) > 1:
            share = max(1, round(spec.test_fraction * len(members)))
            in_test[members[: min(share, len(members) - 1)]] = True
    tested = in_test[units]
    return rows.take(np.flatnonzero(~tested)), rows.take(np.flatnonzero(tested))


def _warn_of_shared_units(train: Rows, test: Rows, unit: str) -> None:
    """The data's own split is kept as it is, but a model may have trained on patients of the test split."""
    seen, tested = ({str(value) for value in rows.columns[unit]} - {"", "None"} for rows in (train, test))
    if shared := len(seen & tested):
        verb = "has" if shared == 1 else "have"
        warn(f"{counted(shared, unit)} of the test rows {verb} train rows too.")


def _limited(rows: Rows, spec: DatasetSpec) -> Rows:
    order = np.random.default_rng(spec.split_seed).permutation(len(rows.content))
    return rows.take(np.sort(order[: spec.limit]))
