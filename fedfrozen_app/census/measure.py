"""A site's counts of its own rows: every table and every mean of a census, before anything is hidden."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.census.cells import Moments, Table, by_interval, by_name, moments
from fedfrozen_app.census.languages import LANGUAGES, SCRIPTS, language, misread, script
from fedfrozen_app.census.records import Records
from fedfrozen_app.data.sources.images import open_image

FIELD = ("present", "missing", "empty")
UNREADABLE = "unreadable"  # an entry in a column of numbers that is not a number
OTHER, NONE = "other", "(none)"  # levels that are not listed; rows without a value
# Fixed for every census, so that no choice of edges can isolate one person in a cell.
LENGTHS = (0, 1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1e9)
SIZES = (1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 1e6)
LEVELS = tuple(range(0, 257, 8))  # of a picture's pixels, 0 to 255
UNKNOWN = (0, 1e-9, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)  # share of a text's tokens
CHANNELS = ("1", "3", "4")
Columns = Mapping[str, Sequence[Any]]  # edges of a numeric column, or levels of a categorical one
Tokens = Callable[[list[str]], list[tuple[int, int]]]  # per text: numbers of tokens and of unknown tokens


@dataclass(frozen=True)
class Measurements:
    people: int
    rows: int
    tables: tuple[Table, ...]
    moments: tuple[Moments, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def measure(records: Records, columns: Columns, tokens: Tokens | None = None) -> Measurements:
    """`columns`: the additional columns to count, each with its edges or levels."""
    tables = [
        _totals(records),
        _classes(records),
        _field("missing/content", records.people, records.content),
        _field("missing/label", records.people, [label or None for label in records.labels]),
        _repeated(records),
    ]
    means: list[Moments] = []
    for name, kinds in columns.items():
        found = _column(records, name, kinds)
        tables += found[0]
        means += found[1]
    content = _content(records, tokens or as_bytes)
    return Measurements(len(records.names), len(records), (*tables, *content[0]), (*means, *content[1]))


def _content(records: Records, tokens: Tokens) -> tuple[list[Table], list[Moments]]:
    """Tables of texts or images; a tabular dataset has nothing beyond the requested columns."""
    if any(isinstance(item, tuple) for item in records.content):
        return [], []
    return _pictures(records) if records.task == "image" else _texts(records, tokens)


def as_bytes(texts: list[str]) -> list[tuple[int, int]]:
    """Token counts of a byte-level model: one per byte plus an end token; none is unknown."""
    return [(len(text.encode("utf-8", "replace")) + 1, 0) for text in texts]


def _totals(records: Records) -> Table:
    return by_name("total", records.people, ["all"] * len(records), ("all",), by_person=True)


def _classes(records: Records) -> Table:
    pairs = [
        (who, label)
        for who, labels in zip(records.people.tolist(), records.labels, strict=True)
        for label in labels or (NONE,)
    ]
    return by_name(
        "classes",
        [who for who, _ in pairs],
        [word for _, word in pairs],
        (*records.classes, NONE),
        by_person=True,
    )


def _field(name: str, people: np.ndarray, values: Sequence[Any]) -> Table:
    return by_name(name, people, [_state(value) for value in values], FIELD, by_person=True)


def _state(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    if isinstance(value, (str, list)) and not (value.strip() if isinstance(value, str) else value):
        return "empty"
    return "present"


def _repeated(records: Records) -> Table:
    """Rows with the same content as another row of this site. One additional person may affect many others'
    cells, so this table is not `by_person`, and a census with noise omits it."""
    times = Counter(records.contents)
    words = [
        NONE if not digest else "repeated" if times[digest] > 1 else "single" for digest in records.contents
    ]
    return by_name("repeated", records.people, words, ("repeated", "single", NONE))


def _column(records: Records, name: str, kinds: Sequence[Any]) -> tuple[list[Table], list[Moments]]:
    values = records.columns.get(name, [None] * len(records))
    states = [_state(value) for value in values]
    if not is_edges(kinds):
        words = [
            str(value).strip() if state == "present" else NONE
            for value, state in zip(values, states, strict=True)
        ]
        return [
            by_name(f"missing/{name}", records.people, states, FIELD, by_person=True),
            by_name(f"words/{name}", records.people, words, (*kinds, NONE), other=OTHER, by_person=True),
        ], []
    numbers = np.array([_number(value) for value in values], dtype=float)
    states = [
        UNREADABLE if state == "present" and math.isnan(number) else state
        for state, number in zip(states, numbers, strict=True)
    ]
    return [
        by_name(f"missing/{name}", records.people, states, (*FIELD, UNREADABLE), by_person=True),
        by_interval(f"numbers/{name}", records.people, numbers, kinds, by_person=True),
    ], [moments(f"numbers/{name}", records.people, numbers)]


def is_edges(kinds: Sequence[Any]) -> bool:
    return bool(kinds) and not isinstance(kinds[0], str)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _texts(records: Records, tokens: Tokens) -> tuple[list[Table], list[Moments]]:
    people = records.people
    held = [row for row, item in enumerate(records.content) if _state(item) == "present"]
    texts = [_text(records.content[row]) for row in held]
    lengths, counts, unknown = (np.full(len(people), math.nan) for _ in range(3))
    words = [[NONE] * len(people) for _ in range(3)]
    if held:
        found = np.array(tokens(texts), dtype=float)
        lengths[held] = [len(text) for text in texts]
        counts[held], unknown[held] = found[:, 0], found[:, 1] / np.maximum(found[:, 0], 1)
    for row, text in zip(held, texts, strict=True):
        words[0][row], words[1][row] = language(text), script(text)
        words[2][row] = "yes" if misread(text) else "no"
    return [
        by_interval("length", people, lengths, LENGTHS, by_person=True),
        by_interval("tokens", people, counts, LENGTHS, by_person=True),
        by_interval("unknown", people, unknown, UNKNOWN, by_person=True),
        by_name("language", people, words[0], (*LANGUAGES, NONE), by_person=True),
        by_name("script", people, words[1], (*SCRIPTS, NONE), by_person=True),
        by_name("misread", people, words[2], ("yes", "no", NONE), by_person=True),
    ], [
        moments("length", people, lengths),
        moments("tokens", people, counts),
        moments("unknown", people, unknown),
    ]


def _text(item: Any) -> str:
    return item if isinstance(item, str) else " ".join(map(str, item))


def _pictures(records: Records) -> tuple[list[Table], list[Moments]]:
    people, bins = records.people, len(LEVELS) - 1
    sizes, channels = np.full((len(people), 2), math.nan), [NONE] * len(people)
    means, shares = np.full(len(people), math.nan), np.zeros((len(people), bins + 1))
    shares[:, bins] = 1.0  # of a row without a picture
    for row, item in enumerate(records.content):
        if item is None:
            continue
        image = open_image(item, item.name if isinstance(item, Path) else f"picture {row}")
        if image.mode not in ("L", "RGB", "RGBA"):
            image = image.convert("RGB")
        sizes[row], channels[row] = image.size, str(len(image.getbands()))
        counts = np.bincount(np.asarray(image).reshape(-1), minlength=256)
        shares[row] = [*counts.reshape(bins, -1).sum(axis=1) / counts.sum(), 0]
        means[row] = (counts * np.arange(256)).sum() / counts.sum()
    rows, levels = np.nonzero(shares)
    values = np.array([*LEVELS[:-1], math.nan])[levels]
    return [
        by_interval("width", people, sizes[:, 0], SIZES, by_person=True),
        by_interval("height", people, sizes[:, 1], SIZES, by_person=True),
        by_name("channels", people, channels, (*CHANNELS, NONE), other=OTHER, by_person=True),
        by_interval("intensity", people[rows], values, LEVELS, shares[rows, levels], by_person=True),
        by_interval("brightness", people, means, LEVELS, by_person=True),
    ], [moments("brightness", people, means)]
