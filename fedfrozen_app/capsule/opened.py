"""Reads an untrusted capsule: strictly and within size limits, before any of it is used."""

import hashlib
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.capsule import crate
from fedfrozen_app.capsule.places import Place
from fedfrozen_app.capsule.write import CAPSULE, FORMAT, SEAL
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.exchange.strict import hash_of, read_json

NAME = re.compile(r"[\w+=-][\w.+=,-]*(?:/[\w+=-][\w.+=,-]*){0,3}", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")
MOST_FILES, MOST_BYTES, MOST_OF_ONE = 20_000, 2_000_000_000, 500_000_000
MOST_RATIO = 200  # of unpacked to packed bytes; JSON of many rounds stays below 50
DEEPEST, LONGEST = 64, 1_000_000  # of capsule.json
PIECE = 1 << 20
# The type of each key's value, in capsule.json and in each of its cells.
KEYS: dict[str, type] = {
    **{"format": int, "title": str, "code": dict, "machine": dict, "places": dict},
    **{"cells": dict, "claims": dict, "left_out": dict, "files": dict, SEAL: str},
}
CELL: dict[str, type] = {
    **{"seed": int, "overrides": list, "configuration": str, "places": list, "splits": dict},
    **{"test_rows": int, "model": str, "seconds": float},
}


@dataclass
class Capsule:
    record: dict[str, Any]  # capsule.json
    folder: Path  # where its files lie
    problems: list[str] = field(default_factory=list)  # a sentence per changed file or value

    @property
    def digest(self) -> str:
        return str(self.record[SEAL])

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        return dict(self.record["cells"])

    def run(self, cell: str) -> Path:
        return self.folder / "runs" / cell

    def place(self, name: str) -> Place:
        found = self.record["places"][name]
        return Place(found["name"], found["files"])


def open_capsule(path: Path, folder: Path, digest: str | None = None) -> Capsule:
    """Unpack into `folder` and check every file against its digest."""
    try:
        with zipfile.ZipFile(path) as packed:
            entries = check_entries(path, packed.infolist())
            unpack(packed, entries, folder)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): give a capsule.") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} is no whole capsule ({printable(str(error))}): get it again.") from error
    record = read_record(folder / CAPSULE)
    problems = []
    if hash_of({key: value for key, value in record.items() if key != SEAL}) != record[SEAL]:
        problems.append(f"{CAPSULE} is not as it was written")
    if digest is not None and record[SEAL] != digest.lower():
        problems.append(f"{CAPSULE} has the digest {record[SEAL]}, and you expect {digest.lower()}")
    return Capsule(record, folder, [*problems, *changed_files(record, folder, set(entries))])


def check_entries(path: Path, found: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Entries by name. Raises for path traversal, links, duplicate names, and sizes beyond the limits."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in found:
        name = info.filename
        if not NAME.fullmatch(name):
            raise _hostile(path, f"its file {printable(name)[:100]} has no plain name")
        if name.casefold() in {one.casefold() for one in entries} if len(entries) < 100 else name in entries:
            raise _hostile(path, f"it holds {name} twice")
        mode = info.external_attr >> 16
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise _hostile(path, f"its {name} is no plain file")
        if info.flag_bits & 1:
            raise _hostile(path, f"its {name} is encrypted")
        if info.file_size > MOST_OF_ONE or info.file_size > MOST_RATIO * info.compress_size + PIECE:
            raise _hostile(path, f"its {name} unpacks to {info.file_size:,} bytes")
        entries[name] = info
    total = sum(info.file_size for info in found)
    if len(found) > MOST_FILES or total > MOST_BYTES:
        raise _hostile(path, f"it unpacks to {len(found):,} files of {total:,} bytes")
    if CAPSULE not in entries:
        raise UserError(f"{path} is no capsule (it has no {CAPSULE}): give a file of `fedfrozen capsule`.")
    return entries


def _hostile(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no capsule that fedfrozen wrote ({why}): do not use it.")


def unpack(packed: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], folder: Path) -> None:
    for name, info in entries.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        left = info.file_size  # the library reads no further, and checks the CRC
        with packed.open(info) as source, target.open("wb") as file:
            while piece := source.read(PIECE):
                left -= len(piece)
                if left < 0:
                    raise zipfile.BadZipFile(f"{name} is larger than it says")
                file.write(piece)


def read_record(path: Path) -> dict[str, Any]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    try:
        record = read_json(text, most=MOST_OF_ONE, depth=DEEPEST, longest=LONGEST)
        _check_kinds(record, KEYS)
        for name, cell in record["cells"].items():
            _check_kinds(cell, CELL)
            if not NAME.fullmatch(name) or "/" in name:
                raise ValueError("a cell has no plain name")
            if not set(cell["places"]) <= record["places"].keys():
                raise ValueError("a cell needs data that are not listed")
        for place in record["places"].values():
            _check_kinds(place, {"name": str, "files": dict})
        digests = [*record["files"].values(), record[SEAL]]
        if not all(isinstance(one, str) and DIGEST.fullmatch(one) for one in digests):
            raise ValueError("a digest is none")
    except ValueError as error:
        raise UserError(
            f"{CAPSULE} cannot be read ({printable(str(error))}): get the capsule again."
        ) from error
    if record["format"] != FORMAT:
        raise UserError(
            f"{CAPSULE} has format {record['format']}, and this version reads {FORMAT}: update it."
        )
    return dict(record)


def _check_kinds(found: Any, kinds: dict[str, type]) -> None:
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    for key, kind in kinds.items():
        value = found.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"its {key} is missing or of another kind")
    if unknown := sorted(found.keys() - kinds.keys()):
        raise ValueError(f"its key {unknown[0]} is unknown")


def changed_files(record: dict[str, Any], folder: Path, there: set[str]) -> list[str]:
    """A sentence for each file that differs from capsule.json."""
    problems = []
    for name, digest in record["files"].items():
        if name not in there:
            problems.append(f"{printable(name)} is missing")
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            problems.append(f"{name} has other bytes than were written")
    problems += [f"{name} was added" for name in sorted(there - record["files"].keys() - {CAPSULE})]
    needed = {
        crate.NAME,
        *(f"runs/{name}/{file}" for name in record["cells"] for file in ("summary.json", "metrics.jsonl")),
    }
    problems += [f"{name} is not listed" for name in sorted(needed & there - record["files"].keys())]
    return list(dict.fromkeys(problems))
