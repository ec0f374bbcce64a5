"""Atomic file writes: written under another name, flushed, then renamed."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from safetensors import SafetensorError, safe_open

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.append import append

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs does not need it
    from torch import Tensor


P = ParamSpec("P")
T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, in a quota, or in a file's limit
RESERVE, RESERVED = ".reserve", 64 * 1024  # bytes
_wait: ContextVar[Callable[[], bool] | None] = ContextVar("wait for room", default=None)


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether the disk was full. Safetensors' error has the number only in its text."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)


@contextmanager
def waiting_for_room(wait: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, writes wait while the disk is full and then continue, so that no work is lost.

    `wait` is called before each retry, and returns whether to retry.
    """
    before = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(before)


def patient(write: Callable[P, T]) -> Callable[P, T]:
    """A decorator for atomic writes, which can be retried when there is space."""

    @wraps(write)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return write(*args, **kwargs)
            except (OSError, SafetensorError) as error:
                wait = _wait.get()
                if wait is None or not is_full(error) or not wait():
                    raise

    return again


@contextmanager
def fresh_folder(part: Path) -> Iterator[None]:
    """An empty folder to fill; it is removed again if writing fails."""
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
    if metadata is not None and len(metadata) > 1:
        _order_metadata(path)
    usual_mode(path)


def _order_metadata(path: Path) -> None:
    """Sort the metadata: the library writes it in random order, so equal arrays would have unequal
    digests."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(size))
        found["__metadata__"] = dict(sorted(found["__metadata__"].items()))
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) != size:
            raise ValueError(f"the header of {path} has {size} bytes, and in another order {len(text)}")
        file.seek(8)
        file.write(text)


def header(path: Path) -> dict[str, str]:
    """The metadata in the header of an array file."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def replace_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write an array file atomically."""
    with whole_file(path) as part:
        save_tensors(tensors, part, metadata)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; at the end of the block the file atomically replaces `path`.

    Its name contains the process id, so that two processes do not write into the same temporary file.
    In the folder of a run or a sweep, the manifest records it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _naming(path):
            yield part
            flush(part)
            manifest.note_file(path, part)
            try:
                part.replace(path)
            except OSError as error:
                manifest.note_back(path)
                raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:  # also Ctrl-C: leave nothing half-written
        part.unlink(missing_ok=True)
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors while writing an open file, which lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    except SafetensorError as error:
        if is_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """`whole_file` for a folder of files; an earlier folder is replaced when the new one is complete.

    If the earlier folder holds other files, nothing is replaced, because they may be the user's.
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
    """Set the mode that the umask allows: some libraries write files that only their owner can read."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.mode")
    if path.is_file():
        probe.touch()
        shutil.copymode(probe, path)
        probe.unlink()


def reserve(folder: Path) -> None:
    """Reserve disk space for a run's final status, so that a run can report a full disk."""
    with (folder / RESERVE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED)


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Reserve space while the block runs."""
    reserve(folder)
    try:
        yield
    finally:
        release(folder)


def release(folder: Path) -> bool:
    """Free the reserved space; returns whether there was any."""
    try:
        (folder / RESERVE).unlink()
    except OSError:
        return False
    return True


def sweep_parts(folder: Path) -> None:
    """Remove partial files of killed processes."""
    for part in folder.glob(".*.part"):
        if part.is_file():
            part.unlink(missing_ok=True)


def same_round(path: Path, number: int) -> bool:
    """Whether this array file exists and holds the model of that round."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("round") == str(number)
    except (OSError, SafetensorError):
        return False


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path) as part:
        # JSON can contain half of a surrogate pair, which UTF-8 cannot encode.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def remove_file(path: Path) -> None:
    """Remove a file if it exists, also from its folder's manifest."""
    if path.exists():
        manifest.note_gone(path)
        path.unlink(missing_ok=True)


@patient
def append_line(path: Path, text: str) -> None:
    """Append a line, completely or not at all; it is on the disk on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, text, mode=0o600)


def flush(path: Path) -> None:
    """Flush to the disk, so that a power cut after the rename cannot leave an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
