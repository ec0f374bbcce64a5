"""brat's standoff format: NAME.txt, and NAME.ann with the spans of its entities by character.

T1<TAB>Medication 104 113<TAB>ibuprofen        spans in pieces (10 14;20 25) are left out, and counted

Tools differ in whether \\r\\n counts as one character or as two; the words beside the spans show which it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import places, warn
from fedfrozen_app.data.sources.entities import Sentences, document_of, found_in_files, tag_spans
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, existing, lines_of, read_utf8, reads

ENTITY = re.compile(r"T\d+\t(\S+) ([\d ;]+)\t(.*)")
SENTENCE_END = re.compile(r"\n+|(?<=[.!?])\s+(?=[A-Z])")
WORD = re.compile(r"\w+|[^\w\s]")


@reads("entities")
def read_brat(spec: DatasetSpec) -> Found:
    root = existing(spec)
    alone = sorted(file for file in root.rglob("*.txt") if not file.with_suffix(".ann").is_file())
    if alone:
        named = places([file.relative_to(root).as_posix() for file in alone])
        warn(f"{root}: {counted(len(alone), 'text')} not read, without an .ann file beside: {named}.")
    return found_in_files(spec, "*.ann", "a brat data set has one beside each .txt.", _read)


def _read(files: list[Path], root: Path) -> Sentences:
    found, lost = Sentences(), 0
    for file in files:
        text_file = file.with_suffix(".txt")
        if not text_file.is_file():
            raise UserError(f"{file} has no text beside it: {text_file.name} is missing.")
        text, spans, pieces = _fitted(file, read_utf8(text_file))
        lost += pieces
        start = 0
        for end, following in [*((m.start(), m.end()) for m in SENTENCE_END.finditer(text)), (len(text), 0)]:
            lost += _add_sentence(found, text, start, end, spans, document_of(file, root))
            start = following
    if lost:
        warn(f"{lost} entities in pieces, overlapping others or across sentences were left out.")
    return found


def _add_sentence(
    found: Sentences, text: str, start: int, end: int, spans: list[tuple[int, int, str]], document: str
) -> int:
    words = list(WORD.finditer(text, start, end))
    inside = []
    cut = 0
    for first, last, kind in spans:
        mark_changed = [n for n, word in enumerate(words) if word.start() < last and word.end() > first]
        if mark_changed and start <= first and last <= end:
            inside.append((mark_changed[0], mark_changed[-1], kind))
        cut += start <= first < end < last
    tags, dropped = tag_spans(len(words), inside)
    found.add([word.group() for word in words], tags, document, f"character {start} of {document}.txt")
    return cut + dropped


def _fitted(file: Path, text: str) -> tuple[str, list[tuple[int, int, str]], int]:
    """The text with its line ends as the annotations count them, its spans, and how many are in pieces."""
    try:
        return text, *_spans(file, text)
    except UserError:
        if "\r\n" not in text:
            raise
    text = text.replace("\r\n", "\n")
    return text, *_spans(file, text)


def _spans(file: Path, text: str) -> tuple[list[tuple[int, int, str]], int]:
    """(first, end, type) by character, and how many entities are in several pieces."""
    spans, pieces = [], 0
    for number, line in enumerate(lines_of(file), start=1):
        if not line.startswith("T"):
            continue  # relations, events and notes
        match = ENTITY.fullmatch(line)
        if match is None:
            raise UserError(
                f"Line {number} of {file} is no entity of brat's (T1, type and span, text): {line!r}."
            )
        if ";" in match[2]:
            pieces += 1
            continue
        first, end = (int(value) for value in match[2].split())
        if not 0 <= first < end <= len(text):
            raise UserError(f"Line {number} of {file} names characters its text does not have: {line!r}.")
        named_words, covered = match[3].split(), text[first:end].split()
        if named_words and named_words != covered:
            raise UserError(
                f"Line {number} of {file} says {match[3]!r} where its text has {text[first:end]!r}: the "
                "annotations belong to another version of the text."
            )
        spans.append((first, end, match[1]))
    return spans, pieces
