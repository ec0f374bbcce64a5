"""`stop.request`: asks the process that Flower runs elsewhere on this machine to end by itself.

Flower's own way to stop a run gives that process no time to write, and its nodes none to take in an order
that is on its way.
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
