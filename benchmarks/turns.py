"""Contestants that take turns round by round, though each is one long run.

A GPU's clock and its neighbours change within minutes, so runs are not compared one after the other: each is
a thread that stops between its rounds, and only the one whose turn it is goes on.
"""

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

from echo import Told, app_telling

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.local import worker_for
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.server.base import PlannedFedAvg, Row


class Over(BaseException):
    """Ends a run that has had its last turn; nothing in it may mistake this for a failure."""


@contextmanager
def unheard() -> Iterator[None]:
    """Without what the runs print. Around all of them: standard output is the process's, not a thread's."""
    with redirect_stdout(io.StringIO()):
        yield


class Turns:
    """`work` is given a function to call before every round; it returns when that round may begin."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self._go, self._waits = Semaphore(0), Semaphore(0)
        self._over = False
        self._failed: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._until_it_waits()

    def turn(self) -> None:
        """One round."""
        self._go.release()
        self._until_it_waits()

    def close(self) -> None:
        self._over = True
        self._go.release()
        self._thread.join()

    def _run(self, work: Callable[[Callable[[], None]], Any]) -> None:
        try:
            work(self._wait_for_turn)
        except Over:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to whoever gave the turn
            self._failed = error
        finally:
            self._waits.release()

    def _wait_for_turn(self) -> None:
        self._waits.release()
        self._go.acquire()
        if self._over:
            raise Over

    def _until_it_waits(self) -> None:
        self._waits.acquire()
        if self._failed is not None:
            raise self._failed


class AppTurns:
    """The app's own run, in process, a round a turn; `rows` are those of `metrics.jsonl`."""

    def __init__(self, words: list[str], corpus: Corpus) -> None:
        self.rows: list[Row] = []
        composed = compose_run(words)
        config = composed.config

        def work(wait: Callable[[], None]) -> None:
            self._wait = wait
            with tempfile.TemporaryDirectory() as folder:
                run_in_process(Job(composed, Path(folder)), corpus=corpus)

        with app_telling(config.strategy["name"], _Keeping(self)):
            self._turns = Turns(work)

    def wait(self) -> None:
        mine = worker_for._installed  # a process has one worker: whoever goes on puts its own back
        self._wait()
        worker_for._installed = mine

    def turn(self) -> Mapping[str, Any]:
        """The row of the round just done."""
        self._turns.turn()
        return self.rows[-1]

    def close(self) -> None:
        self._turns.close()


class _Keeping(Told):
    def __init__(self, run: AppTurns) -> None:
        super().__init__(begins=lambda number: run.wait())
        object.__setattr__(self, "run", run)

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        self.run.rows.append(json.loads(json.dumps(row)))  # type: ignore[attr-defined]
        return False, {}
