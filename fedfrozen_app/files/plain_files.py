"""A run folder holds plain files and folders.

A link in one that somebody else made could lead a verb that reads or writes there to any file of its user.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.files.kinds import kind_of, runs_below


def check_plain(folder: Path) -> None:
    """Refuse a run, a sweep, or a folder with runs, in which a link or a special file lies."""
    folder = folder.resolve()
    for place in (folder,) if kind_of(folder) else runs_below(folder):
        for path, mode in _entries(place):
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = "a link" if stat.S_ISLNK(mode) else "no file or folder"
                raise UserError(
                    f"{printable(str(path))} is {what}, and a run folder holds plain files: whoever made it "
                    "could lead this command to other files of yours. If it is your own, put what it points "
                    "to in its place."
                )


def check_no_links(folder: Path) -> None:
    """Refuse a folder for a run or a sweep in which a link or a special file lies: every verb would."""
    for path, mode in _entries(folder):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            what = "a link" if stat.S_ISLNK(mode) else "no file or folder"
            raise UserError(
                f"{printable(str(path))} is {what}, and a run folder holds plain files: give another "
                "output_dir."
            )


def _entries(folder: Path) -> Iterator[tuple[Path, int]]:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            yield path, path.lstat().st_mode
