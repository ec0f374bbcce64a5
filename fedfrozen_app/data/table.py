"""What a data set looks like once read: tensors that stay in memory.

Rows are decoded once, when a run starts. Every round then only indexes, so that no time goes into
opening the same files again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.vocabulary import Vocabulary
from fedfrozen_app.data.preprocessing import Preprocessing
from fedfrozen_app.tasks.entity_tags import CONTINUED, IGNORED
from fedfrozen_app.tasks.target import target_of

__all__ = ["CONTINUED", "IGNORED", "Corpus", "InputShape", "Novel", "Table", "TextReading"]


@dataclass(frozen=True)
class Table:
    """Labelled rows.

    Tables: ``{"numbers": float64 (n, numbers), "categories": int64 (n, columns)}``. Images:
    ``{"pixel_values": uint8 (n, c, h, w)}``. Text: ``{"input_ids": int64 (n, t), "attention_mask": int64 (n,
    t)}``; in chunks (n, chunks, t). Labels are int64: a class ``(n,)``, several as 0 and 1 ``(n, classes)``,
    or one for each token ``(n, t)``: its tag, or for a language model the token itself, where it is to be
    predicted from those before it. Of a mask each pixel's class is uint8, ``(n, h, w)``.
    """

    inputs: dict[str, Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor | np.ndarray) -> Table:
        """The rows at these numbers, in this order."""
        rows = torch.as_tensor(index, dtype=torch.int64, device=self.labels.device)
        return Table({name: value[rows] for name, value in self.inputs.items()}, self.labels[rows])

    def to(self, device: torch.device | str) -> Table:
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Table(inputs, self.labels.to(device))


@dataclass(frozen=True)
class TextReading:
    """How texts become tokens, the same at every client; text_reading.py decides it."""

    max_tokens: int
    chunks: int = 1
    vocabulary: Vocabulary | None = None  # None: the model's own tokenizer, or bytes

    def spec(self) -> dict[str, Any]:
        """For the data specification."""
        own = {} if self.vocabulary is None else self.vocabulary.spec()
        return {"max_tokens": self.max_tokens, "chunks": self.chunks, **own}

    def marks(self) -> dict[str, str]:
        """For the header of every file with the run's arrays: its embeddings belong to these tokens."""
        return {} if self.vocabulary is None else {"tokenizer": self.vocabulary.digest}

    def check_marks(self, marks: Mapping[str, str]) -> None:
        """Refuse, with a `UserError`, a file whose tokens are others."""
        if marks.get("tokenizer", "") != self.marks().get("tokenizer", ""):
            raise UserError(
                "The tokenizer here is not the one that the stored model was trained with (their digests "
                "differ): set dataset.tokenizer to the tokenizer.json in its run's folder, or to own for "
                "a run that learned none."
            )


@dataclass(frozen=True)
class Novel:
    """Classes that are held back, and the test rows of these, numbered from 0 on."""

    classes: tuple[str, ...]
    test: Table


@dataclass(frozen=True)
class Corpus:
    """A data set with everything that training, partitioning and reports need to know about it."""

    name: str
    task: str  # a name in the registry's group `tasks`
    classes: tuple[str, ...]  # none for a language model, a number or a survival time
    train: Table
    test: Table
    columns: dict[str, np.ndarray]  # per train row: what one may partition by, such as "domain"
    mean: tuple[float, ...]  # per channel, of pixels in 0..1; empty for text
    std: tuple[float, ...]
    vocab_size: int  # 0 for images
    pad_token_id: int
    strata: np.ndarray  # (n,) per train row: the number of its label mix, which partitions go by
    stratum_names: tuple[str, ...]
    units: np.ndarray  # (n,) per train row: rows with one number (a patient, a document) are never parted
    test_strata: np.ndarray  # per test row, numbered as those of the train rows
    test_units: np.ndarray  # the same for the test rows, which intervals are drawn over
    test_columns: dict[str, np.ndarray] = field(default_factory=dict)  # the same per test row
    novel: Novel | None = None  # whose train rows stay in the table, and belong to no client
    reading: TextReading | None = None  # how texts became tokens; None for pictures
    rows: Any = None  # those of texts as they were read (sources.Prepared), where they are few; for baselines
    account: dict[str, Any] = field(default_factory=dict)  # what became of the rows read; see data/account.py
    preprocessing: Preprocessing | None = None  # how cells became numbers; None for pictures and texts
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the target; see tasks/target.py

    @property
    def every_class(self) -> tuple[str, ...]:
        """Those of the labels of all train rows."""
        return self.classes + (self.novel.classes if self.novel else ())

    @cached_property
    def unit_strata(self) -> np.ndarray:
        """The label mix of each unit, by the unit's number."""
        found = np.zeros(self.units.max() + 1, dtype=np.int64)
        found[self.units] = self.strata
        return found

    def spec(self) -> dict[str, Any]:
        """What every client must agree on to read its data as the others do."""
        found: dict[str, Any] = {
            "classes": list(self.classes),
            "mean": list(self.mean),
            "std": list(self.std),
        }
        if self.reading is not None:
            found["text"] = self.reading.spec()
        if self.preprocessing is not None:
            found |= {"table": self.preprocessing.spec(), "target": dict(self.settings)}
        return found


@dataclass(frozen=True)
class InputShape:
    """What the data look like to a model."""

    task: str  # a name in the registry's group `tasks`
    classes: tuple[str, ...]
    channels: int = 0
    image_size: int = 0
    vocab_size: int = 0
    max_tokens: int = 0
    pad_token_id: int = 0
    numbers: int = 0  # of a table's row
    levels: tuple[int, ...] = ()  # of each of its categorical columns
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the target

    @property
    def is_table(self) -> bool:
        return bool(self.numbers or self.levels)

    @property
    def is_pictures(self) -> bool:
        return not self.is_table and target_of(self.task, self.settings).reads_pictures

    @property
    def over_pixels(self) -> bool:
        """Whether a picture has a prediction for each of its pixels."""
        return self.is_pictures and target_of(self.task, self.settings).over_pixels

    @property
    def intercept(self) -> bool:
        """Whether a bias of the last layer has an effect."""
        return target_of(self.task, self.settings).intercept

    @property
    def outputs(self) -> int:
        """How many logits the model has for a row, or for each token."""
        return target_of(self.task, self.settings).outputs(self.classes)

    def __post_init__(self) -> None:
        target = target_of(self.task, self.settings)
        few = len(self.classes) < 2 and target.has_classes
        if few or len(set(self.classes)) != len(self.classes):
            raise UserError(
                f"a classifier needs two or more classes with different names, not {self.classes}"
            )
        sizes = ("channels", "image_size") if self.is_pictures else ("vocab_size", "max_tokens")
        if self.is_table:
            return
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError(
                    f"{self.task} data have {name} {getattr(self, name)}, but it must be 1 or more"
                )
