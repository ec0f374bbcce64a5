"""CoNLL files: a word and its tag a line, a blank line between sentences, -DOCSTART- before each document.

In a file without such a mark every sentence is a unit of its own, unless `dataset.unmarked=files`.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import file_read, places, warn
from fedfrozen_app.data.sources.entities import Sentences, document_of, found_in_files
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, existing, lines_of, reads

logger = logging.getLogger(__name__)
DOCUMENT, NO_NAME = "-DOCSTART-", "-X-"  # CoNLL-2003 fills its columns with the latter
# Of a folder's files: those of the first ending that is there.
ENDINGS = ("*.conll", "*.iob", "*.bio", "*.tsv", "*.txt")
LONG = 500  # words: no sentence has so many
FILES = "files"  # of `dataset.unmarked`


@reads("entities")
def read_conll(spec: DatasetSpec) -> Found:
    read = partial(_read, whole_files=spec.unmarked == FILES)
    root = existing(spec)
    pattern = next((ending for ending in ENDINGS if root.is_dir() and any(root.rglob(ending))), ENDINGS[0])
    others = ", ".join(ENDINGS[1:-1])
    return found_in_files(spec, pattern, f"a CoNLL data set has them, or {others} or {ENDINGS[-1]}.", read)


def _read(files: list[Path], root: Path, *, whole_files: bool) -> Sentences:
    found, unmarked = Sentences(), Sentences()
    for file in files:
        sentences, marked = _read_file(file, document_of(file, root))
        if not (marked or whole_files):
            sentences.documents = [f"{name}#{n}" for n, name in enumerate(sentences.documents, start=1)]
            unmarked.extend(sentences)
        found.extend(sentences)
    if unmarked.words:
        logger.info(
            "%s: no %s, so that each of %s is a unit of its own; dataset.unmarked=files keeps those "
            "of a file together.",
            *(root, DOCUMENT, counted(len(unmarked.words), "sentence")),
        )
    return found


def _read_file(file: Path, name: str) -> tuple[Sentences, bool]:
    """Its sentences, and whether it marks its documents."""
    found, document, number, width = Sentences(), name, 0, 0
    words: list[str] = []
    tags: list[str] = []
    for line, text in enumerate([*lines_of(file), ""], start=1):
        cells = re.split(r"[ \t]+", text.strip()) if text.strip() else []
        if not cells or cells[0] == DOCUMENT:
            found.add(words, tags, document, f"the sentence before line {line} of {file.name}")
            words, tags = [], []
            if cells:
                _warn_before_first_mark(found, number, file)
                number += 1
                named = len(cells) > 2 and cells[1] != NO_NAME
                document = cells[1] if named else f"{name}/{number}"
        elif len(cells) < 2 or not (cells[-1] == "O" or cells[-1][:2] in ("B-", "I-")):
            raise UserError(f"Line {line} of {file} is no word with a BIO tag: {text.strip()!r}.")
        elif len(cells) != (width := width or len(cells)):
            raise UserError(
                f"Line {line} of {file} has {len(cells)} columns where those before have {width}: a word and "
                f"its tag a line, without spaces in them: {text.strip()!r}."
            )
        else:
            words.append(cells[0])
            tags.append(cells[-1])
    _warn_of_long_sentences(found, file)
    file_read(file.name, rows=len(found.words), encoding="utf-8", documents=number)
    return found, number > 0


def _warn_before_first_mark(found: Sentences, marks: int, file: Path) -> None:
    if found.words and not marks:
        before = counted(len(found.words), "sentence")
        warn(f"{before} of {file.name} stand before its first {DOCUMENT}, and count as one document.")


def _warn_of_long_sentences(found: Sentences, file: Path) -> None:
    lengths = [(len(words), origin) for words, origin in zip(found.words, found.origins, strict=True)]
    if long := [(count, origin) for count, origin in lengths if count > LONG]:
        warn(
            f"{file.name}: {counted(len(long), 'sentence')} of more than {LONG} words, the longest of "
            f"{max(long)[0]} ({places([origin for _, origin in long])}): is no blank line between sentences?"
        )
