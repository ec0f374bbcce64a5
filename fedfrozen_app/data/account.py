"""What became of a data set's rows on the way into a run: read, dropped and why, and what looked wrong.

A reader says it where it happens (`warn`, `dropped`); `accounting` collects all that is said within it.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)
SHOWN = 5  # line numbers in a sentence


@dataclass
class Account:
    warnings: list[str] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # rows of each split, as its files hold them
    dropped: dict[str, Counter[str]] = field(default_factory=dict)  # of each split, by reason

    def as_json(self) -> dict[str, Any]:
        splits = {
            split: {"read": count, "dropped": dict(self.dropped.get(split, {}))}
            for split, count in self.read.items()
        }
        return {"files": self.files, "splits": splits, "warnings": self.warnings}


_open: ContextVar[Account | None] = ContextVar("account", default=None)


@contextmanager
def accounting() -> Iterator[Account]:
    """Collect what is said of the rows that are read within."""
    account = Account()
    token = _open.set(account)
    try:
        yield account
    finally:
        _open.reset(token)


def warn(sentence: str) -> None:
    """A warning that the run also keeps."""
    logger.warning("%s", sentence)
    if (account := _open.get()) is not None:
        account.warnings.append(sentence)


def file_read(name: str, **how: Any) -> None:
    if (account := _open.get()) is not None:
        account.files.append({"file": name, **how})


def rows_read(split: str, count: int) -> None:
    if (account := _open.get()) is not None:
        account.read[split] = count


def dropped(split: str, reason: str, count: int) -> None:
    if count and (account := _open.get()) is not None:
        account.dropped.setdefault(split, Counter())[reason] += count


def near_names(counts: Mapping[str, int]) -> list[list[str]]:
    """Groups of names that differ in case, spaces or hyphens alone, or are one number; the most frequent
    name of each first."""
    groups: dict[str, list[str]] = {}
    for name in counts:
        plain = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name)).casefold().strip()
        if re.fullmatch(r"\d+\.?\d*", plain):
            plain = str(float(plain))
        groups.setdefault(plain, []).append(name)
    return [sorted(alike, key=lambda one: -counts[one]) for alike in groups.values() if len(alike) > 1]


def places(origins: Sequence[str]) -> str:
    """Where rows came from, for a sentence: the first few."""
    more = f" and {len(origins) - SHOWN} more" if len(origins) > SHOWN else ""
    return f"{', '.join(origins[:SHOWN])}{more}"
