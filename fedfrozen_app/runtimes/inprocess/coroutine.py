"""A function that suspends where it requests something, and is resumed with the value.

A generator would do if the request were not deep inside: a run makes it within its strategy's loop. So each
coroutine has a thread. One of them runs at a time and the others wait: no two are ever in the same code.
"""

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class ThreadCoroutine(Generic[Result]):
    """Calls `function` with itself as the argument, so that the function can `request` values."""

    def __init__(self, function: Callable[["ThreadCoroutine[Result]"], Result]) -> None:
        self.requested: Any = None  # what it waits for; None once it has ended
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._resumed, self._suspended = Semaphore(0), Semaphore(0)
        self._value: Any = None
        self._raised: BaseException | None = None

        def body() -> None:
            try:
                self.result = function(self)
            except BaseException as error:  # noqa: BLE001  (of any kind: the caller decides about it)
                self.error = error
            self.requested = None
            self._suspended.release()

        self._thread = Thread(target=body, daemon=True)

    def start(self) -> None:
        """Run until the first request or the end."""
        self._thread.start()
        self._wait()

    def resume(self, value: Any) -> None:
        """Return `value` from `request`, or raise it there if it is an exception. Run until the next one."""
        self._raised = value if isinstance(value, BaseException) else None
        self._value = None if self._raised else value
        self._resumed.release()
        self._wait()

    def request(self, wanted: Any) -> Any:
        """Suspend until `resume` gives the value. Called by the function itself."""
        self.requested = wanted
        self._suspended.release()
        self._resumed.acquire()
        value, raised, self.requested = self._value, self._raised, None
        self._value = self._raised = None
        if raised is not None:
            raise raised
        return value

    def _wait(self) -> None:
        try:
            self._suspended.acquire()
        except KeyboardInterrupt:  # the coroutine still runs: wait, because only one may
            self._suspended.acquire()
            raise
