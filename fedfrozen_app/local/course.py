"""Work that stops where private steps are to be taken, so that clients of one process may take them together.

A course is a generator: it gives the steps that are due, and goes on with what they came to.
"""

from collections.abc import Generator
from typing import Protocol, TypeVar, cast

from torch import Tensor

Trained = tuple[dict[str, Tensor], float | None]  # a client's arrays after its steps, and their mean loss
Result = TypeVar("Result")


class Due(Protocol):
    """Steps that a client has paid for and not yet taken."""

    def by_itself(self) -> Trained: ...


Course = Generator[Due, Trained, Result]


def by_itself(course: Course[Result]) -> Result:
    """To its end, its steps taken beside nobody."""
    try:
        due = next(course)
        while True:
            due = course.send(due.by_itself())
    except StopIteration as over:
        return cast(Result, over.value)
