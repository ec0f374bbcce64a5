"""A disk that is full from the n-th write on: below a folder, files, appends and arrays fail with ENOSPC.

Deleting still works, and gives no room back but for the reserve.
"""

import builtins
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

WRITES = set("wax+")


class Disk:
    """Counts the writes below a folder, and refuses them from number `last` on."""

    def __init__(self, folder: Path, last: int | None, *, named: bool) -> None:
        self.folder, self.last, self.named = str(folder.resolve()), last, named
        self.count, self.refused = 0, ""
        self.where: list[str] = []
        self.credit = 0  # small writes that still succeed: the reserve was given back

    def takes(self, path: Any) -> bool:
        """Whether this write has room; paths elsewhere always have."""
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  (which asks the patched functions)
        if not place.startswith(self.folder):
            return True
        self.count += 1
        self.where.append(os.path.relpath(place, self.folder))
        if self.last is None or self.count < self.last:
            return True
        if self.credit:
            self.credit -= 1
            return True
        self.refused = self.refused or self.where[-1]
        return False

    def check(self, path: Any) -> None:
        if not self.takes(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([os.fsdecode(path)] * self.named))


@contextmanager
def full_from(folder: Path, last: int | None, *, named: bool = True) -> Iterator[Disk]:
    """Inside the block the disk is full from the write with this number on; None: never. Errors of opening
    have the file's name, those of writing into an open file have not."""
    disk = Disk(folder, last, named=named)
    plain_open, os_open, os_write = builtins.open, os.open, os.write
    link, save, unlink, fallocate = os.link, safetensors.torch.save_file, os.unlink, os.posix_fallocate
    appended: dict[int, str] = {}

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if WRITES & set(mode) and not isinstance(file, int):
            disk.check(file)
        return plain_open(file, mode, *args, **kwargs)

    def os_opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        number = os_open(path, flags, *args, **kwargs)
        if flags & os.O_APPEND:
            appended[number] = os.fspath(path)
        else:
            appended.pop(number, None)
        return number

    def writing(number: int, content: Any) -> int:
        if number in appended and not disk.takes(appended[number]):
            os_write(number, bytes(content)[: len(content) // 2])  # what had room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), appended[number])
        return os_write(number, content)

    def saving(arrays: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if not disk.takes(path):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(arrays, path, *args, **kwargs)

    def linking(source: Any, target: Any, **kwargs: Any) -> None:
        disk.check(target)
        link(source, target, **kwargs)

    def unlinking(path: Any, **kwargs: Any) -> None:
        unlink(path, **kwargs)
        if os.fspath(path).endswith(".reserve"):
            disk.credit = 4

    def allocating(number: int, start: int, size: int) -> None:
        disk.check(f"{folder}/.reserve")
        fallocate(number, start, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opening)
        patch.setattr(io, "open", opening)
        patch.setattr(os, "open", os_opening)
        patch.setattr(os, "write", writing)
        patch.setattr(os, "link", linking)
        patch.setattr(os, "unlink", unlinking)
        patch.setattr(os, "posix_fallocate", allocating)
        patch.setattr(safetensors.torch, "save_file", saving)
        yield disk
