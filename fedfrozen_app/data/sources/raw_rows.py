"""What a data set is before it becomes tensors: plain rows, and where they came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError


@dataclass(frozen=True)
class DatasetSpec:
    """Where the data are and how to read them."""

    name: str = "digits"
    kind: str = "digits"  # a name in the registry's group `datasets`
    # classification, multilabel, entities or language; None: what the kind of data suggests
    task: str | None = None
    path: str | None = None  # folder or file; for hub "owner/name" or "owner/name:config"
    train_split: str = "train"  # folder, file, split-column or hub name of the train rows
    test_split: str = "test"
    image_column: str | None = None  # columns: None means look for the obvious one
    label_column: str | None = None
    text_column: str | None = None
    prompt_column: str | None = None  # of a language model's rows; None: the obvious one, or none
    answer_column: str | None = None
    separator: str | None = None  # between prompt and answer; None: the end of a line
    prompt_loss: bool = False  # whether a prompt's own tokens are to be predicted too
    unit_column: str | None = None  # rows with one value (a patient) are never parted; None: the reader knows
    unmarked: str = "sentences"  # what of a CoNLL file without document marks is a unit; or "files"
    top_labels: int | None = None  # multilabel: only the most frequent ones
    image_size: int | None = None  # side in pixels; None keeps the images' own common size
    channels: int | None = None  # 1 or 3; None: 1 where every image is grey, else 3
    max_tokens: int = 128
    chunks: int = 1  # of so many tokens each, that a text is read in
    test_fraction: float = 0.2  # held out per class where the data bring no test split
    split_seed: int = 0  # not the run's seed: all runs share one test set
    limit: int | None = None  # at most so many rows of train and of test, for quick tries
    keep_classes: tuple[str, ...] | None = None  # drop the rows of all other classes
    mean: tuple[float, ...] | None = None  # per channel in 0..1; None: from the train pixels
    std: tuple[float, ...] | None = None
    window: tuple[float, ...] | None = None  # of DICOM and NIfTI: centre and width; None: the file's own
    slices: int | None = None  # of each series; None: all
    query: str | None = None  # of a database
    # Of a table:
    columns: tuple[str, ...] | None = (
        None  # that the model reads; None: all but those that have another purpose
    )
    not_columns: tuple[str, ...] | None = None  # columns with another purpose, such as the site's
    categorical: tuple[str, ...] | None = None  # that hold categories, even where these are numbers
    missing: str = "median"  # what becomes of a row with a missing value; or "drop"
    indicators: bool = True
    normalise: str = "federation"  # or "site", "none"
    statistics: str | None = None  # a file with the preprocessing, in place of what the train rows say
    time_column: str | None = None
    event_column: str | None = None
    survival_model: str = "cox"  # or "discrete"
    ties: str = "breslow"  # or "efron"
    intervals: int = 10
    time_edges: tuple[float, ...] | None = None


@dataclass
class Rows:
    """Rows as found: content not yet decoded, labels still names.

    A row's label is a class name; for a multi-label task the list of its labels, the primary one first; for
    entities a BIO tag for each word; for a language model what kind of text it is, which rows are dealt by.
    """

    # An image as bytes, path or array; a text as str, as words, or as (prompt, answer); of a table the
    # cells; None
    # where missing.
    content: list[Any]
    labels: list[Any]
    columns: dict[str, list[Any]]
    origins: list[str]  # where each row came from, for error sentences

    def take(self, index: Iterable[int]) -> Rows:
        rows = list(index)
        return Rows(
            [self.content[row] for row in rows],
            [self.labels[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.columns.items()},
            [self.origins[row] for row in rows],
        )

    def where(self, keep: Sequence[bool]) -> Rows:
        return self.take(row for row, kept in enumerate(keep) if kept)


@dataclass
class Found:
    """What a reader hands over."""

    task: str  # a name in the registry's group `tasks`
    train: Rows
    test: Rows | None  # None: the data bring no test split
    class_names: tuple[str, ...] | None = None  # in the order that the data themselves give
    unit: str | None = None  # the column whose values must not be parted over splits and clients
    fields: tuple[str, ...] = ()  # of a table: the columns whose cells each row's content are


Reader = Callable[[DatasetSpec], Found]


def reads(*tasks: str, path: bool = True) -> Callable[[Reader], Reader]:
    """Declare what a reader's data can be read as, and whether it needs `dataset.path`.

    Without this a reader reads rows for classification, from a path.
    """

    def mark(reader: Reader) -> Reader:
        reader.__dict__.update(tasks=tasks, needs_path=path)
        return reader

    return mark


@dataclass
class Frame:
    """A table file, or a split from the hub, as plain lists."""

    cells: dict[str, list[Any]]
    origins: list[str]
    images: set[str] = field(default_factory=set)  # the columns that hold images
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def existing(spec: DatasetSpec) -> Path:
    path = Path(str(spec.path)).expanduser()
    if not path.exists():
        raise UserError(f"dataset.path={spec.path} does not exist (looked at {path.absolute()}).")
    return path


def word_in_name(word: str, file: Path, root: Path) -> bool:
    """Whether a file's name, or a folder on the way to it, has this word: ptt-train.conll, test/12.ann."""
    parts = (*file.relative_to(root).parts[:-1], file.name.split(".")[0]) if file != root else (file.stem,)
    return any(word == part or word in re.split(r"[-_ ]", part) for part in parts)


def read_utf8(file: Path) -> str:
    """A text as it is, without the mark that Windows puts first; line ends stay, because spans count them."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text ({first_line(error)}): convert it.") from error


def lines_of(file: Path) -> list[str]:
    """By line ends alone: `splitlines` would also part a line at a page break, and shift all that follow."""
    found = re.split(r"\r\n|\r|\n", read_utf8(file))
    for number, line in enumerate(found, start=1):
        if "\0" in line:
            raise UserError(f"{file} is damaged: line {number} holds a zero byte. Save it as text in UTF-8.")
    return found


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
