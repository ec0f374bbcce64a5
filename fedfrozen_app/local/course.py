"""Work that stops where private steps are to be paid for, and where they are to be taken, so that clients of
one process may do either together.

A course is a generator: it gives what is due, and goes on with what that came to.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from torch import Tensor

Trained = tuple[dict[str, Tensor], float | None]  # a client's arrays after its steps, and their mean loss
Result = TypeVar("Result")


class Due(Protocol):
    """Steps that a client has paid for and not yet taken."""

    def by_itself(self) -> Trained: ...


@dataclass(frozen=True)
class Payment:
    """What has to be on the client's disk before it goes on. It looks at nothing that others use."""

    by_itself: Callable[[], None]


Course = Generator[Due | Payment, Trained | None, Result]


def by_itself(course: Course[Result]) -> Result:
    """To its end, its steps taken beside nobody."""
    try:
        due = next(course)
        while True:
            due = course.send(due.by_itself())
    except StopIteration as over:
        return cast(Result, over.value)
