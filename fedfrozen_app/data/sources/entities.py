"""What the readers of tagged text share: sentences of words with BIO tags, gathered by document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.account import warn
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, existing, word_in_name
from fedfrozen_app.tasks.entity_tags import OUTSIDE


@dataclass
class Sentences:
    words: list[list[str]] = field(default_factory=list)
    tags: list[list[str]] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # the institution, where the files name one

    def add(
        self, words: Sequence[str], tags: Sequence[str], document: str, origin: str, source: str = ""
    ) -> None:
        if not words:
            return
        self.words.append(list(words))
        self.tags.append(iob2(tags))
        self.documents.append(document)
        self.origins.append(origin)
        self.sources.append(source)

    def extend(self, more: Sentences) -> None:
        self.words += more.words
        self.tags += more.tags
        self.documents += more.documents
        self.origins += more.origins
        self.sources += more.sources

    def rows(self) -> Rows:
        columns = {"document": self.documents}
        if any(self.sources):
            columns["source"] = self.sources
        return Rows(list(self.words), list(self.tags), columns, self.origins)


def iob2(tags: Sequence[str]) -> list[str]:
    """Every entity begins with B: an I that follows nothing of its type becomes one."""
    found: list[str] = []
    for tag in tags:
        starts = tag.startswith("I-") and (not found or found[-1][2:] != tag[2:])
        found.append(f"B-{tag[2:]}" if starts else tag)
    return found


def tag_spans(count: int, spans: Sequence[tuple[int, int, str]]) -> tuple[list[str], int]:
    """BIO tags for `count` words from spans (first, last, type); where two overlap the longer one stays.

    Also returns how many were dropped.
    """
    tags, dropped = [OUTSIDE] * count, 0
    for first, last, kind in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        if any(tag != OUTSIDE for tag in tags[first : last + 1]):
            dropped += 1
            continue
        tags[first] = f"B-{kind}"
        tags[first + 1 : last + 1] = [f"I-{kind}"] * (last - first)
    return tags, dropped


def document_of(file: Path, root: Path) -> str:
    """With the folders on the way to it: two sites may both have a 1.txt."""
    return file.stem if file == root else file.relative_to(root).with_suffix("").as_posix()


def found_in_files(
    spec: DatasetSpec, pattern: str, what: str, read: Callable[[list[Path], Path], Sentences]
) -> Found:
    """Files of the train and the test split by the words in their names; one pile where none is named so."""
    root = existing(spec)
    files = sorted(root.rglob(pattern)) if root.is_dir() else [root]
    if not files:
        raise UserError(f"No {pattern} file found in {root}: {what}")
    train = [file for file in files if word_in_name(spec.train_split, file, root)]
    test = [file for file in files if file not in train and word_in_name(spec.test_split, file, root)]
    if not train:
        train = [file for file in files if file not in test]
    elif ignored := [file.name for file in files if file not in train + test]:
        shown = ", ".join(ignored[:5]) + (", ..." if len(ignored) > 5 else "")
        warn(f"{root}: not read, neither train nor test: {shown}.")
    if not train:
        raise UserError(
            f"{root} has only test files: set dataset.train_split to the word of the train files."
        )
    return Found(
        "tokens", read(train, root).rows(), read(test, root).rows() if test else None, unit="document"
    )
