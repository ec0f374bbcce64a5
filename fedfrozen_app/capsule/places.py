"""The files and folders that a configuration reads, identified by digest so that others can find them.

A capsule contains none of these data and no path of its machine; it contains `data/NAME` in their place.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedfrozen_app.config import absolute_paths, quoted
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted, printable
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.files.folder_manifest import file_digest

NOT_DATA = ("output_dir", "runtime.cache_dir", "runtime.server_kit", "run_id", "overwrite")
DIGITS = 12  # of a digest, as shown to people
Files = dict[str, str]  # relative name ("" for a single file): SHA-256


@dataclass(frozen=True)
class Place:
    """The file or folder that a key such as dataset.path names."""

    name: str
    files: Files

    @property
    def digest(self) -> str:
        return hash_of(self.files)

    @property
    def shown(self) -> str:
        return (
            f"{printable(self.name)} ({counted(len(self.files), 'file')}, SHA-256 {self.digest[:DIGITS]}...)"
        )

    def differs(self, other: "Place") -> str:
        """The first file of the other that differs from this one; "" if none does."""
        for name, digest in self.files.items():
            label = printable(name) or "it"
            if name not in other.files:
                return f"{label} is missing"
            if other.files[name] != digest:
                return f"{label} has other bytes"
        added = next((name for name in other.files if name not in self.files), None)
        return "" if added is None else f"{printable(added)} was added"


def files_of(path: Path) -> Files:
    """The digest of every file in this folder and below. Hidden files (names with a dot) are not data."""
    if path.is_file():
        return {"": file_digest(path)}
    found = {
        file.relative_to(path).as_posix(): file_digest(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    }
    if not found:
        raise UserError(f"{path} holds no files: give the data's folder.")
    return found


def places_of(resolved: Mapping[str, Any]) -> dict[str, Path]:
    """The local files and folders that this configuration reads, by key."""
    found = {key: Path(path) for key, path in absolute_paths(dict(resolved)).items() if key not in NOT_DATA}
    for key, path in found.items():
        if not path.exists():
            raise UserError(f"{key}={path} is gone: a capsule needs its digest; put it back.")
    return found


def placeholder(key: str, path: Path) -> str:
    return str(PurePosixPath("data", f"{hashlib.sha256(key.encode()).hexdigest()[:4]}-{path.name}"))


def portable(value: Any, names: Mapping[str, str]) -> Any:
    """The same plain values with `names` (path: placeholder) in place of this machine's paths."""
    if isinstance(value, str):
        for path, name in names.items():
            value = value.replace(path, name)
        return value
    if isinstance(value, Mapping):
        return {portable(key, names): portable(one, names) for key, one in value.items()}
    return [portable(one, names) for one in value] if isinstance(value, list) else value


def portable_words(words: list[str], names: Mapping[str, str]) -> list[str]:
    """The overrides of a run without its output folders, and with placeholders for paths."""
    kept = []
    for override in OverridesParser.create().parse_overrides(words):
        key = str(override.key_or_group)
        if key in NOT_DATA or key.startswith("hydra"):
            continue
        value = override.value()
        if isinstance(value, str) and portable(value, names) != value:
            kept.append(quoted(key, portable(value, names)))
        else:
            kept.append(str(override.input_line))
    return kept
