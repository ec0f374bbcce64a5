"""Distinguishes folders that may not be read from those that hold nothing."""

import logging
import os
from pathlib import Path

from fedfrozen_app.core.errors import UserError

log = logging.getLogger(__name__)


def unreadable(folder: Path) -> str:
    """Why what is in the folder cannot be read; "" where it can, or where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)  # which needs more than the names does
                break
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_readable(folder: Path) -> None:
    if why := unreadable(folder):
        raise UserError(unreadable_text(folder, why))


def unreadable_text(folder: Path, why: str) -> str:
    return f"{folder} cannot be read ({why}): ask its owner for permission."


def folders_with(folder: Path, names: tuple[str, ...]) -> tuple[list[Path], list[OSError]]:
    """The folders below that hold a file of one of these names, and what could not be read."""
    hidden: list[OSError] = []
    found = [
        Path(place)
        for place, _, files in os.walk(folder, onerror=hidden.append)
        if not set(names).isdisjoint(files)
    ]
    return found, hidden
