"""Work that stops where private steps are to be paid for, where they are to be taken, and where a reply is to
be kept, so that clients of one process may do each together.

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


@dataclass(frozen=True)
class Keeping:
    """What the client puts onto its disk for later. Nobody whose process it shares need wait for it: whoever
    opens its record next does."""

    prepare: Callable[..., Callable[[], None]]  # `apart`: from what is sent, which others may change

    def by_itself(self) -> None:
        self.prepare(apart=False)()

    def beside_others(self) -> Callable[[], None]:
        """The work, to be done on any thread."""
        return self.prepare(apart=True)


Course = Generator[Due | Payment | Keeping, Trained | None, Result]


def by_itself(course: Course[Result]) -> Result:
    """To its end, its steps taken beside nobody."""
    try:
        due = next(course)
        while True:
            due = course.send(due.by_itself())
    except StopIteration as over:
        return cast(Result, over.value)
    finally:  # whoever keeps a traceback would keep it where it stopped, and its record locked
        course.close()
