"""Files that are whole or absent: written beside their place, flushed, then renamed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from fedfrozen_app.errors import UserError

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
    usual_mode(path)


def replace_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file of arrays whole or not at all."""
    with whole_file(path) as part:
        save_tensors(tensors, part, metadata)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, in whichever way: what is there at the end of the block takes its place at once.

    The name holds the process's number: two that write the same file must not write into each other's.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        flush(part)
        part.replace(path)
    except BaseException:  # also Ctrl-C: nothing half-written stays
        part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The same for a folder of files; an earlier one is replaced when the new one is whole.

    Whatever else lies there is somebody's, and then nothing is replaced.
    """
    part, old = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        made = {file.name for file in part.iterdir()}
        if path.is_dir() and (others := sorted({file.name for file in path.iterdir()} - made)):
            raise UserError(f"{path} holds {others[0]}, which is not of this kind: give a folder of its own.")
        for file in part.rglob("*"):
            usual_mode(file)
            flush(file)
        if path.exists():
            path.rename(old)
        part.rename(path)
        flush(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def usual_mode(path: Path) -> None:
    """Readable by whom the umask allows: some libraries shut everybody else out of what they write."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.mode")
    if path.is_file():
        probe.touch()
        shutil.copymode(probe, path)
        probe.unlink()


def sweep_parts(folder: Path) -> None:
    """Remove what killed processes had begun to write."""
    for part in folder.glob(".*.part"):
        if part.is_file():
            part.unlink(missing_ok=True)


def same_round(path: Path, number: int) -> bool:
    """Whether this file of arrays is there and holds the model of that round."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("round") == str(number)
    except (OSError, SafetensorError):
        return False


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as part:
        # JSON can carry half of a surrogate pair, which UTF-8 cannot.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def flush(path: Path) -> None:
    """Onto the disk, so that a power cut after the rename cannot leave an empty file behind."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
