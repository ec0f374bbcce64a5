"""CoNLL files: a word and its tag a line, a blank line between sentences, -DOCSTART- before each document."""

from __future__ import annotations

from pathlib import Path

from fedfrozen_app.data.sources.entities import Sentences, found_in_files
from fedfrozen_app.data.sources.rows import DatasetSpec, Found, first_line
from fedfrozen_app.errors import UserError

DOCUMENT = "-DOCSTART-"


def read_conll(spec: DatasetSpec) -> Found:
    return found_in_files(spec, "*.conll", "a CoNLL data set has them.", _read)


def _read(files: list[Path], root: Path) -> Sentences:
    found = Sentences()
    for file in files:
        document, number = file.stem, 0  # without document marks a file is one document
        words: list[str] = []
        tags: list[str] = []
        for line, text in enumerate([*_lines(file), ""], start=1):
            cells = text.split()
            if not cells or cells[0] == DOCUMENT:
                found.add(words, tags, document, f"the sentence before line {line} of {file.name}")
                words, tags = [], []
                if cells:
                    number += 1
                    document = cells[1] if len(cells) > 2 else f"{file.stem}/{number}"
            elif len(cells) < 2 or not (cells[-1] == "O" or cells[-1][:2] in ("B-", "I-")):
                raise UserError(f"Line {line} of {file} is no word with a BIO tag: {text.strip()!r}.")
            else:
                words.append(cells[0])
                tags.append(cells[-1])
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text ({first_line(error)}).") from error
