"""Objects that modules keep with a worker between messages: one per class, created on first use.

A worker knows none of these classes. The module that uses an object owns its class.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept:
    """Objects that last as long as the worker, and objects that end with its run."""

    def __init__(self) -> None:
        self._by_worker: dict[type[Any], Any] = {}
        self._by_run: dict[type[Any], Any] = {}

    def for_worker(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        return _found(self._by_worker, kind, make)

    def for_run(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        return _found(self._by_run, kind, make)

    def find(self, kind: type[T]) -> T | None:
        """The worker's object of this class; None if nothing has asked for it."""
        return self._by_worker.get(kind)

    def end_run(self) -> None:
        self._by_run.clear()


def _found(objects: dict[type[Any], Any], kind: type[T], make: Callable[[], T] | None) -> T:
    if kind not in objects:
        objects[kind] = (make or kind)()
    found: T = objects[kind]
    return found
