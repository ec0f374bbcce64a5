"""Append lines to a file, each completely or not at all."""

import errno
import os
from pathlib import Path


def append(path: Path, text: str, *, mode: int = 0o666, sync: bool = True) -> None:
    """Append a line. With `sync` it is on the disk on return. Half a line would corrupt the next one too."""
    line = (text + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    try:
        whole = os.fstat(handle).st_size
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, whole)
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)
