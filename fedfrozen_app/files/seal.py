"""Records that show whether they were damaged: each holds the digest of itself and of the files beside it.

A flipped bit in an array is still an array: without this a run would go on from it, and nobody would know.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL, FILES = "sha256", "files"
# What reading a damaged file can raise, beside a library's own errors.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def sealed(record: Mapping[str, Any], *files: Path) -> str:
    """The record as JSON, with its own digest and those of the files that lie beside it."""
    content = {**record, FILES: {path.name: _file_digest(path) for path in files}} if files else dict(record)
    return json.dumps({**content, SEAL: _digest(content)})


def unsealed(path: Path) -> dict[str, Any]:
    """Read the record and check its files; raises one of `DAMAGED` if anything has changed."""
    record = json.loads(path.read_text("utf-8"))
    if record.pop(SEAL) != _digest(record):
        raise ValueError(f"{path.name} is not as it was written")
    for name, digest in record.pop(FILES, {}).items():
        if _file_digest(path.with_name(name)) != digest:
            raise ValueError(f"{name} is not as it was written")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    # What was read back has the same text: JSON keeps order and numbers.
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
