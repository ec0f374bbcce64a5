"""Distinguishes unreadable folders from empty ones."""

import logging
import os
from pathlib import Path

from fedfrozen_app.core.errors import UserError

log = logging.getLogger(__name__)


def unreadable(folder: Path) -> str:
    """Why the folder's content cannot be read; "" if it can, or if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)  # needs more permissions than listing names
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
    """The folders below that hold a file with one of these names, and the errors of unreadable ones."""
    hidden: list[OSError] = []
    found = [
        Path(place)
        for place, _, files in os.walk(folder, onerror=hidden.append)
        if not set(names).isdisjoint(files)
    ]
    return found, hidden
