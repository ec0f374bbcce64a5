"""Checks that a run folder holds only plain files and folders.

A link in another user's run folder could redirect a verb that reads or writes there to any file of its
caller.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.files.kinds import kind_of, runs_below


def check_plain(folder: Path) -> None:
    """Refuse a run, a sweep, or a folder with runs, that contains a link or a special file."""
    folder = folder.resolve()
    for place in (folder,) if kind_of(folder) else runs_below(folder):
        for path, what in _special(place):
            raise UserError(
                f"{printable(path)} is {what}, and a run folder holds plain files: whoever made it "
                "could lead this command to other files of yours. If it is your own, put what it points "
                "to in its place."
            )


def check_no_links(folder: Path) -> None:
    """Refuse a folder for a run or a sweep that contains a link or a special file: every verb would refuse
    it."""
    for path, what in _special(folder):
        raise UserError(
            f"{printable(path)} is {what}, and a run folder holds plain files: give another output_dir."
        )


def _special(folder: Path | str) -> Iterator[tuple[str, str]]:
    """Paths that are neither files nor folders, and what they are. Skips unreadable folders: the verb that
    needs their content reports them."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _special(entry.path)
        elif not entry.is_file(follow_symlinks=False):
            yield entry.path, "a link" if entry.is_symlink() else "no file or folder"
