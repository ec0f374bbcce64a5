"""The command `fedfrozen`: a verb with its arguments, or Hydra overrides to train."""

import errno
import logging
import os
import sys

from fedfrozen_app.commands.help_page import requested_text
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.signals import ignore_signals, interrupt_on_signals
from fedfrozen_app.core.streams import forgive_streams, print_text

INTERRUPTED = 130
BAD_INPUT = 2
# What can be done about a file that the operating system refuses to read or write.
OF_FILES = {
    errno.EACCES: "Ask its owner for permission, or give another folder.",
    errno.EPERM: "Ask its owner for permission, or give another folder.",
    errno.EROFS: "Give a folder that can be written.",
    errno.ENOSPC: "Make room there, then give the same command again.",
    errno.EDQUOT: "Make room there, then give the same command again.",
    errno.EFBIG: "Make room there, then give the same command again.",
    errno.EISDIR: "A file belongs there: move the folder away.",
    errno.EIO: "Its disk fails: give another folder, or bring the file back from a copy.",
    errno.ENAMETOOLONG: "Give a shorter path.",
    errno.ELOOP: "Its links lead back to themselves: give the folder itself.",
}

LINK_LOOP = "Symlink loop"  # how pathlib begins to say so


def main() -> None:
    forgive_streams()
    try:
        code = run(sys.argv[1:])
    finally:
        ignore_signals()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    if (text := requested_text(arguments)) is not None:
        print(text)
        return 0
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us: Hydra would print several lines and exit 1
    try:
        prepare_logging()
    except UserError as error:
        print_text(f"fedfrozen: {error}", sys.stderr)
        return BAD_INPUT
    # Flower logs every setting: in our own process our own lines are enough.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    interrupt_on_signals()
    try:
        from fedfrozen_app import commands

        return commands.dispatch(arguments)
    except UserError as error:
        print_text(f"fedfrozen: {error}", sys.stderr)
        return BAD_INPUT
    except OSError as error:  # a file that may not be read, or a disk without room
        if error.filename is None or error.errno not in OF_FILES:
            raise
        name = os.fsdecode(error.filename)
        print_text(f"fedfrozen: {name}: {error.strerror}. {OF_FILES[error.errno]}", sys.stderr)
        return BAD_INPUT
    except RuntimeError as error:
        if not str(error).startswith(LINK_LOOP):
            raise
        print_text(f"fedfrozen: {error}. {OF_FILES[errno.ELOOP]}", sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    main()
