"""Runs of a study in processes of their own, each finished one a line of a file.

A run is a cell with a name; its row is appended at once. The same call again makes what is missing, whether
the last one ended or was killed.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cells import append

Row = dict[str, Any]


class Named(Hashable, Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


def run_missing(
    missing: Callable[[], Sequence[C]],
    run: Callable[[C, str], Row],
    options: str,
    *,
    out: Path,
    workers: int,
    minutes: float,
) -> list[str]:
    """Run what is missing; why cells have failed. A cell whose process died is begun once more; none is begun
    after `minutes`."""
    problems, deaths = dict[C, str](), Counter[C]()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and (left := [cell for cell in missing() if cell not in problems]):
        running: dict[Future[Row], C] = {}
        watch = partial(leave_with, os.getpid())
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=watch) as pool:
            try:
                while left or running:
                    if time.monotonic() >= end:
                        left.clear()
                    while left and len(running) < workers:
                        cell = left.pop(0)
                        running[pool.submit(run, cell, options)] = cell
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        if problem := finish(running[future], future, out):
                            problems[running[future]] = problem
                        del running[future]
            except BrokenExecutor:
                deaths.update(running.values())
                problems |= {cell: "its process died twice" for cell in running.values() if deaths[cell] > 1}
    return [f"{cell.name}: {problem}" for cell, problem in problems.items()]


def finish(cell: Named, future: Future[Row], out: Path) -> str:
    """Write the row of a run that has ended, or say why there is none."""
    try:
        row = future.result()
    except BrokenExecutor:
        raise
    except Exception as error:  # noqa: BLE001  (one cell's failure must not end the others)
        print(f"{cell.name}: {type(error).__name__}: {error}", flush=True)
        return str(error)
    append(out, row)
    print(f"{cell.name}: {row['score']:.4f} in {row['seconds']:.0f} s", flush=True)
    return ""


def leave_with(parent: int) -> None:
    """In a worker: end when the process that began it does, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
