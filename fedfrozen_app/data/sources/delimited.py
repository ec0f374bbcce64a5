"""CSV and TSV files, read strictly: what does not fit is an error or a counted warning."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import file_read, places, warn
from fedfrozen_app.data.sources.raw_rows import Frame, first_line

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
REPLACED = "\ufffd"  # what a program writes for a letter that it could not read
SHORT = 40  # characters: a longer cell is no category
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class Line:
    """One record of a file: its cells, and the line on which it begins."""

    cells: list[str]
    number: int


def delimited_frame(file: Path) -> Frame:
    """The table as text throughout: "007" stays an id."""
    text, encoding = decoded(file)
    delimiter = "\t" if ".tsv" in file.suffixes else _delimiter(text, file)
    lines = _records(text, delimiter, file)
    if not lines:
        raise UserError(f"{file} holds no table: it is empty.")
    names, rows = _header(lines[0], file), lines[1:]
    if not rows:
        raise UserError(f"{file} holds a header and no rows.")
    _check_ragged(rows, len(names), delimiter, file)
    _check_swallowed(rows, len(names), delimiter, file)
    if bad := [f"line {row.number}" for row in rows if any(REPLACED in cell for cell in row.cells)]:
        warn(
            f"{file.name}: {counted(len(bad), 'row')} hold letters that another program could not read "
            f"(\ufffd; {places(bad)})."
        )
    file_read(file.name, rows=len(rows), encoding=encoding, delimiter=delimiter, columns=names)
    cells = {name: [row.cells[place] for row in rows] for place, name in enumerate(names)}
    return Frame(cells, [f"line {row.number} of {file.name}" for row in rows])


def decoded(file: Path) -> tuple[str, str]:
    """(text, encoding): UTF-8, UTF-16 by its mark, else Windows-1252 with a warning."""
    data = file_bytes(file)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return data.decode("utf-16"), "utf-16"
        except UnicodeDecodeError as error:
            raise UserError(f"{file} cannot be read as UTF-16 text ({first_line(error)}).") from error
    if b"\x00" in data:
        place = data[: data.index(b"\x00")].count(b"\n") + 1
        raise UserError(f"{file} is no text: line {place} holds a zero byte. Save it as CSV in UTF-8.")
    try:
        return data.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = _western(data)
    found = [str(number) for number, line in enumerate(data.split(b"\n"), 1) if not _is_utf8(line)]
    warn(
        f"{file.name} is not UTF-8: {counted(len(found), 'line')} read as {encoding} (line {places(found)}). "
        "Save it as UTF-8 if letters look wrong."
    )
    return text, encoding


def file_bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
        return gzip.decompress(data) if file.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}).") from error


def _western(data: bytes) -> tuple[str, str]:
    try:
        return data.decode("cp1252"), "windows-1252"
    except UnicodeDecodeError:  # five bytes have no letter there
        return data.decode("latin-1"), "latin-1"


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _delimiter(text: str, file: Path) -> str:
    """The one by which most rows have as many cells as the header; commas where several are as good."""
    best, found = (0.0, 0), ","
    for one in DELIMITERS:
        try:
            lines = _records(text, one, file)
        except UserError:
            continue
        width = len(lines[0].cells) if lines else 0
        if width > 1:
            fitting = sum(len(line.cells) == width for line in lines) / len(lines)
            if (fitting, width) > best and (best[0] < 1 or fitting == 1):
                best, found = (fitting, width), one
            if one == "," and fitting == 1:
                break
    if found != ",":
        warn(f"{file.name}: read with {DELIMITERS[found]} between cells.")
    return found


def _records(text: str, delimiter: str, file: Path) -> list[Line]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    found, start = [], 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells) or len(cells) > 1:
                found.append(Line(cells, start))
            start = reader.line_num + 1
    except csv.Error as error:
        ends = "is never closed" if "end of data" in str(error) else "is closed within a cell"
        raise UserError(
            f"{file}: a quote that opens in line {start} {ends} (seen in line {reader.line_num}): close "
            'it, or write a quote within a cell twice ("").'
        ) from error
    return found


def _header(line: Line, file: Path) -> list[str]:
    names = [cell.strip() or f"Unnamed: {place}" for place, cell in enumerate(line.cells)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{file} has two columns called {twice[0]!r}: rename one of them.")
    return names


def _check_ragged(rows: Sequence[Line], width: int, delimiter: str, file: Path) -> None:
    wrong = [row for row in rows if len(row.cells) != width]
    if wrong:
        where = places([f"line {row.number} has {len(row.cells)}" for row in wrong])
        raise UserError(
            f"{len(wrong)} of {counted(len(rows), 'row')} of {file} do not have the {counted(width, 'cell')} "
            f"of the header ({where}): mend them, or put cells that hold {DELIMITERS[delimiter]} in quotes."
        )


def _check_swallowed(rows: Sequence[Line], width: int, delimiter: str, file: Path) -> None:
    """A cell over several lines is fine; one whose lines look like rows has most likely lost its end."""
    inner = [(row, cell) for row in rows for cell in row.cells if "\n" in cell or "\r" in cell]
    if not inner or width < 2:
        return
    known = [Counter(row.cells[place].strip() for row in rows) for place in range(width)]
    for row, cell in inner:
        lines = re.split(r"\r\n|\r|\n", cell)[1:]
        alike = [line for line in lines if _is_row(line, known, delimiter)]
        if not alike:
            continue
        span = f"The quoted cell in line {row.number} of {file} goes on for {len(lines)} more lines, and "
        if 2 * len(alike) >= len(lines) - 1:
            raise UserError(f"{span}{counted(len(alike), 'line')} of it look like rows: close its quote.")
        warn(f"{span}{counted(len(alike), 'line')} of it look like rows: see whether its quote is closed.")


def _is_row(line: str, known: list[Counter[str]], delimiter: str) -> bool:
    """As many cells as the header, and one of them a short value that other rows have in that column."""
    cells = line.split(delimiter)
    return len(cells) == len(known) and any(
        0 < len(cell.strip()) <= SHORT and known[place][cell.strip().strip('"')] > 1
        for place, cell in enumerate(cells)
    )
