"""Files that are whole or absent: written beside their place, flushed, then renamed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:  # torch takes seconds to import, and whoever only looks at runs does not need it
    from torch import Tensor


@contextmanager
def fresh_folder(part: Path) -> Iterator[None]:
    """An empty folder to fill; when the disk gives out on the way, it is removed again."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield
    except (OSError, SafetensorError):
        shutil.rmtree(part, ignore_errors=True)
        raise


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """`metadata` goes into the file's header."""
    from safetensors.torch import save_file

    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(arrays, path, metadata=metadata)


def replace_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file of arrays whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        save_tensors(tensors, part, metadata)
    except (OSError, SafetensorError):
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


def same_round(path: Path, number: int) -> bool:
    """Whether this file of arrays is there and holds the model of that round."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("round") == str(number)
    except (OSError, SafetensorError):
        return False


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        flush(part)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


def flush(path: Path) -> None:
    """Onto the disk, so that a power cut after the rename cannot leave an empty file behind."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
