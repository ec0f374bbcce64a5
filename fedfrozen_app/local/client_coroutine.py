"""A client's work as a coroutine that yields before private steps are paid for, before they are taken, and
before a reply is stored, so that the clients of one process can do each of these together.

It yields the work to do, and receives the result through `send`.
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
    """What must be on the client's disk before it continues. It reads nothing that other clients use."""

    run_alone: Callable[[], None]


@dataclass(frozen=True)
class ReplyToStore:
    """A reply that the client writes to its disk for a later resend. Other clients of the process need not
    wait for it; only the next access to this client's record does."""

    prepare: Callable[..., Callable[[], None]]  # `apart`: from copies: others may change what is sent

    def run_alone(self) -> None:
        self.prepare(apart=False)()

    def deferred(self) -> Callable[[], None]:
        """The work as a function, to be called later from any thread."""
        return self.prepare(apart=True)


ClientCoroutine = Generator[DueSteps | Payment | ReplyToStore, Trained | None, Result]


def run_alone(coroutine: ClientCoroutine[Result]) -> Result:
    """Run a coroutine to its end, without other clients."""
    try:
        due = next(coroutine)
        while True:
            due = coroutine.send(due.run_alone())
    except StopIteration as over:
        return cast(Result, over.value)
    finally:  # a stored traceback would keep the coroutine suspended, and its record locked
        coroutine.close()
