"""A client's work as a coroutine that stops where private steps are to be paid for, where they are to be
taken, and where a reply is to be stored, so that the clients of one process can do each together.

It yields what is due, and is sent the result.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from torch import Tensor

# A client's arrays after its steps, with the state that it keeps (`namespace/name`), and their mean loss.
Trained = tuple[dict[str, Tensor], float | None]
Result = TypeVar("Result")


class DueSteps(Protocol):
    """Steps that a client has paid for and not yet taken."""

    def run_alone(self) -> Trained: ...


@dataclass(frozen=True)
class Payment:
    """What has to be on the client's disk before it continues. It reads nothing that other clients use."""

    run_alone: Callable[[], None]


@dataclass(frozen=True)
class ReplyToStore:
    """What the client writes to its disk for later. Other clients of its process need not wait for it; what
    opens the client's record next does."""

    prepare: Callable[..., Callable[[], None]]  # `apart`: copied from what is sent, which others may change

    def run_alone(self) -> None:
        self.prepare(apart=False)()

    def deferred(self) -> Callable[[], None]:
        """The work, to be done later on any thread."""
        return self.prepare(apart=True)


ClientCoroutine = Generator[DueSteps | Payment | ReplyToStore, Trained | None, Result]


def run_alone(coroutine: ClientCoroutine[Result]) -> Result:
    """Run to its end, without other clients."""
    try:
        due = next(coroutine)
        while True:
            due = coroutine.send(due.run_alone())
    except StopIteration as over:
        return cast(Result, over.value)
    finally:  # a kept traceback would keep it where it stopped, and its record locked
        coroutine.close()
