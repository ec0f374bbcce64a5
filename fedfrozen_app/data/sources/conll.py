"""CoNLL files: a word and its tag a line, a blank line between sentences, -DOCSTART- before each document."""

from __future__ import annotations

import re
from pathlib import Path

from fedfrozen_app.data.sources.entities import Sentences, document_of, found_in_files
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, lines_of, reads
from fedfrozen_app.errors import UserError

DOCUMENT, NO_NAME = "-DOCSTART-", "-X-"  # CoNLL-2003 fills its columns with the latter


@reads("entities")
def read_conll(spec: DatasetSpec) -> Found:
    return found_in_files(spec, "*.conll", "a CoNLL data set has them.", _read)


def _read(files: list[Path], root: Path) -> Sentences:
    found = Sentences()
    for file in files:
        document, number = document_of(file, root), 0  # without document marks a file is one document
        words: list[str] = []
        tags: list[str] = []
        for line, text in enumerate([*lines_of(file), ""], start=1):
            cells = re.split(r"[ \t]+", text.strip()) if text.strip() else []
            if not cells or cells[0] == DOCUMENT:
                found.add(words, tags, document, f"the sentence before line {line} of {file.name}")
                words, tags = [], []
                if cells:
                    number += 1
                    named = len(cells) > 2 and cells[1] != NO_NAME
                    document = cells[1] if named else f"{document_of(file, root)}/{number}"
            elif len(cells) < 2 or not (cells[-1] == "O" or cells[-1][:2] in ("B-", "I-")):
                raise UserError(f"Line {line} of {file} is no word with a BIO tag: {text.strip()!r}.")
            else:
                words.append(cells[0])
                tags.append(cells[-1])
    return found
