"""A function that stops where it asks for something, and goes on when it is given the answer.

A generator would do if the asking were not deep inside: a run asks from within its strategy's loop. So every
strand has a thread, of which one runs at a time and the others wait: no two are ever in the same code.
"""

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Strand(Generic[Result]):
    """`function` is called with this strand, by which it asks."""

    def __init__(self, function: Callable[["Strand[Result]"], Result]) -> None:
        self.asks: Any = None  # what it waits for; None once it is over
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._answer: Any = None
        self._raised: BaseException | None = None

        def body() -> None:
            try:
                self.result = function(self)
            except BaseException as error:  # noqa: BLE001  (of whatever kind: it is the caller's to judge)
                self.error = error
            self.asks = None
            self._stopped.release()

        self._thread = Thread(target=body, daemon=True)

    def start(self) -> None:
        """Run until it asks or is over."""
        self._thread.start()
        self._wait()

    def answer(self, given: Any) -> None:
        """Give it what it asked for, or raise there if that is an exception; run until it asks again."""
        self._raised = given if isinstance(given, BaseException) else None
        self._answer = None if self._raised else given
        self._go.release()
        self._wait()

    def ask(self, wanted: Any) -> Any:
        """Called by the function itself."""
        self.asks = wanted
        self._stopped.release()
        self._go.acquire()
        answer, raised, self.asks = self._answer, self._raised, None
        self._answer = self._raised = None
        if raised is not None:
            raise raised
        return answer

    def _wait(self) -> None:
        try:
            self._stopped.acquire()
        except KeyboardInterrupt:  # the strand still runs, and nobody else must
            self._stopped.acquire()
            raise
