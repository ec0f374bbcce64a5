"""A Flower run's output, and how it ended."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.files.disk import is_full
from fedfrozen_app.runtimes.flower.processes import SimulationFailed, tail

WORKER = r"\(\w+ pid=\d+(, ip=[^)]+)?\)"  # Ray names the machine if it is another one
# Flower's and Ray's own lines, which are not shown. The complete log is in the run's folder.
FLOWERS_OWN = re.compile(
    rf"^(INFO|WARNING|DEBUG) :|^Successfully installed |^({WORKER}|\(raylet(, ip=[^)]+)?\))"
    r"|FutureWarning|^  warnings\.warn|^\s*$"
    # Flower's text when our ServerApp ended with an error: the command's last line is its sentence.
    r"|^ERROR :\s+(ServerApp raised an exception|Exit Code: \d+)\s*$|^An unhandled exception occurred in the "
    r"ServerApp\.|^For more information, visit: |^Traceback \(most recent call last\):$"
    r"|^fedfrozen_app\.core\.errors\.(UserError|RunFailed): "
)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: `completed`, `failed` or `stopped`, with Flower's details and the run's log."""

    status: str
    details: str
    log: list[str]


@contextmanager
def kept(
    path: Path, on_line: Callable[[str], None], *, append: bool = False
) -> Iterator[Callable[[str], None]]:
    """A function that writes each line to this file, then calls `on_line` with it."""
    try:
        with path.open("a" if append else "w", encoding="utf-8", buffering=1) as log:

            def keep(line: str) -> None:
                log.write(line + "\n")
                on_line(line)

            yield keep
    except OSError as error:  # errors of an open file lack its name
        if error.filename is None and is_full(error):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def show(line: str) -> None:
    """Print a line of a run's log without the worker's name, unless it is Flower's own."""
    line = re.sub(rf"^{WORKER} (?=Worker \d+ trains on )", "", line)
    if not FLOWERS_OWN.search(line):
        print(line, flush=True)


def failure(end: RunEnd, more: str = "") -> Exception:
    """The error of a failed run: our ServerApp's own sentence, or else the end of the log; then `more`."""
    for kind in (UserError, RunFailed):
        head = f"{kind.__module__}.{kind.__name__}: "
        for line in end.log:
            sentence = line.removeprefix(head)
            if sentence != line and end.details.endswith(sentence):
                return kind(sentence)
    ending = f"The Flower run {end.status}" + (f": {end.details}" if end.details else "")
    return SimulationFailed("\n".join(part for part in (ending, tail(end.log), more) if part))
