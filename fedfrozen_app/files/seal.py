"""Records with checksums: each holds the digest of itself and of the files next to it.

An array with a flipped bit is still valid: without checksums a run would silently continue from it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedfrozen_app.core.errors import DAMAGED, UserError

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

SEAL, FILES = "sha256", "files"


def sealed(record: Mapping[str, Any], *files: Path) -> str:
    """The record as JSON, with its own digest and those of the files next to it."""
    content = {**record, FILES: {path.name: _file_digest(path) for path in files}} if files else dict(record)
    return json.dumps({**content, SEAL: _digest(content)})


def unsealed(path: Path, *, alone: bool = False) -> dict[str, Any]:
    """Read the record and, unless `alone`, check its files; raises one of `DAMAGED` if anything changed."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON") from error
    record = opened(found, path.name)
    files = record.pop(FILES, {})
    for name, digest in {}.items() if alone else files.items():
        if _file_digest(path.with_name(name)) != digest:
            raise ValueError(f"{name} is not as it was written")
    return record


def opened(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The record read from the file `name`, without its own digest, which is checked."""
    content = {key: value for key, value in record.items() if key != SEAL}
    if record[SEAL] != _digest(content):
        raise ValueError(f"{name} is not as it was written")
    return content


def reason(error: Exception) -> str:
    """Why a file could not be read, with its name."""
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error)


def save_arrays(arrays: "Mapping[str, Tensor]", path: Path, metadata: Mapping[str, str]) -> None:
    """Write an array file whose header has the digest of itself and of the arrays."""
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous() for name, value in arrays.items()}
    digest = _arrays_digest({name: value.numpy() for name, value in plain.items()}, metadata)
    save_file(plain, path, metadata={**metadata, SEAL: digest})


def read_arrays(path: Path) -> "tuple[dict[str, ndarray], dict[str, str]]":
    """The arrays and the header; raises `UserError` if either is damaged."""
    try:
        with safe_open(path, "np") as file:
            metadata = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = metadata.pop(SEAL, None)  # older files have none
        if digest is not None and digest != _arrays_digest(arrays, metadata):
            raise ValueError("it is not as it was written")
    except (SafetensorError, *DAMAGED) as error:
        raise UserError(f"{path} is damaged ({reason(error)}): bring it back from a copy.") from error
    return arrays, metadata


def _arrays_digest(arrays: "Mapping[str, ndarray]", metadata: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        value = arrays[name]
        found.update(f"{name} {value.dtype} {value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def _digest(record: Mapping[str, Any]) -> str:
    # Reading back gives the same text: JSON preserves order and numbers.
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
