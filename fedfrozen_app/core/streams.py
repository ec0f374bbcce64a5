"""Standard output and error that may close at any time: that ends printing, not the run."""

import contextlib
import errno
import os
import sys
from typing import IO, Any, TextIO

from fedfrozen_app.core.formatting import printable_lines

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # `| head`, a closed terminal, `>&-`: no reader is left


def print_text(text: object, file: IO[str] | None = None) -> None:
    """Print a text with untrusted parts, which cannot move the cursor or hide a line."""
    print(printable_lines(str(text)), file=file or sys.stdout)


class Forgiving:
    """A text stream that discards output after the first write error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None  # the write error, if any

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.error = error
        # Buffered output must be written somewhere, or Python complains at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if error.errno not in GONE and self is sys.stdout:
            with contextlib.suppress(OSError):
                print(f"fedfrozen: the output cannot be printed ({error.strerror}).", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forgive_streams() -> None:
    """Make standard output and error exist, and never end the process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before Python began
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        if not isinstance(stream, Forgiving) and _is_file(stream):
            setattr(sys, name, Forgiving(stream))


def _is_file(stream: Any) -> bool:
    """Not a notebook's, nor one that a test reads: those know no numbers of files."""
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError, ValueError):
        return False
