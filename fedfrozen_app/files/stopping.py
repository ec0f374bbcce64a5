"""`stop.request`: asks the process that Flower started on this machine to end by itself.

Flower's own stop gives that process no time to write its results, and its nodes no time to receive pending
requests.
"""

from pathlib import Path

from fedfrozen_app.files.disk import replace_file

FILE = "stop.request"


def ask_to_stop(folder: Path, flower_run: int) -> None:
    replace_file(folder / FILE, str(flower_run))


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def stop_asked(folder: Path, flower_run: int) -> bool:
    """Whether this run was asked to stop: the file may be from an earlier one."""
    try:
        return (folder / FILE).read_text("utf-8") == str(flower_run)
    except OSError:
        return False
