"""The i2b2/VA 2010 layout: NAME.txt with a sentence a line, NAME.con with its concepts.

    c="chest pain" 12:3 12:4||t="problem"        lines from 1, words from 0, both ends included

Texts and concepts may lie in folders of their own (txt/, concept/); the folder above them names the
institution (beth/, partners/), which `partition=natural partition.column=source` divides by.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import places, warn
from fedfrozen_app.data.sources.entities import Sentences, found_in_files, tag_spans
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, existing, lines_of, reads

CONCEPT = re.compile(r'c="(.*)" (\d+):(\d+) (\d+):(\d+)\|\|t="([^"]+)"')
HOLDERS = ("txt", "concept", "concepts", "con")
Spans = dict[int, list[tuple[int, int, str]]]  # by line, from 1


@reads("entities")
def read_i2b2(spec: DatasetSpec) -> Found:
    concepts = _concepts_of(existing(spec))
    if not concepts:
        raise UserError(f"No *.con file found in {spec.path} beside a text: an i2b2 data set has them.")

    texts = sorted(existing(spec).rglob("*.txt"))
    if alone := [file for file in texts if file not in concepts]:
        named = places([file.relative_to(existing(spec)).as_posix() for file in alone])
        warn(f"{spec.path}: {counted(len(alone), 'text')} not read, without a .con file: {named}.")

    def read(files: list[Path], root: Path) -> Sentences:
        found, lost = Sentences(), 0
        for file in files:
            if file not in concepts:
                continue  # the corpus also has texts without annotations
            lines = lines_of(file)
            spans = _spans(concepts[file], lines)
            *folders, name = _place(file, root)
            source, document = folders[-1] if folders else "", "/".join((*folders, name))
            for number, line in enumerate(lines, start=1):
                words = line.split()
                tags, dropped = tag_spans(len(words), spans.get(number, ()))
                lost += dropped
                found.add(words, tags, document, f"line {number} of {file.name}", source)
        if lost:
            warn(f"{lost} concepts overlap longer ones and were left out.")
        return found

    return found_in_files(spec, "*.txt", "an i2b2 data set has texts.", read)


def _concepts_of(root: Path) -> dict[Path, Path]:
    """Each text's concepts: of the same place, else of the same name where just one text bears it."""
    texts = {_place(file, root): file for file in sorted(root.rglob("*.txt"))}
    found: dict[Path, Path] = {}
    for concept in sorted(root.rglob("*.con")):
        place = _place(concept, root)
        fitting = [place] if place in texts else [other for other in texts if other[-1] == place[-1]]
        if len(fitting) > 1:
            one, other = (texts[place] for place in fitting[:2])
            raise UserError(
                f"{concept} may belong to {one} or {other}: keep it below the same folder as its text."
            )
        found |= {texts[place]: concept for place in fitting}
    return found


def _place(file: Path, root: Path) -> tuple[str, ...]:
    """The folders on the way to a file, but for those that hold one kind of file, and its name."""
    folders = [part for part in file.relative_to(root).parts[:-1] if part.lower() not in HOLDERS]
    return (*folders, file.stem)


def _spans(file: Path, lines: list[str]) -> Spans:
    found: Spans = {}
    for number, text in enumerate(lines_of(file), start=1):
        if not text.strip():
            continue
        match = CONCEPT.fullmatch(text.strip())
        if match is None:
            raise UserError(f'Line {number} of {file} is no concept (c="..." 1:0 1:2||t="..."): {text!r}.')
        line, first, end_line, last = (int(value) for value in match.group(2, 3, 4, 5))
        words = lines[line - 1].split() if 1 <= line <= len(lines) else []
        named_words = " ".join(match[1].lower().split())
        if line != end_line or " ".join(words[first : last + 1]).lower() != named_words:
            raise UserError(
                f"Line {number} of {file} names words that its text does not have there: {text!r}."
            )
        found.setdefault(line, []).append((first, last, match[6]))
    return found
