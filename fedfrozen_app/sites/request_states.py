"""The states of a request at a site, and the one function that moves a request from one state to the next.

What a handler does is a table of transitions. A transition has a step, which does the work, and a guard,
which states why the next state is not reached: it looks at what the site has on its disk and at what is about
to leave, not at what the step claims. A request is answered in a final state, and there is no other way to
one than through the table. If the site is killed between two states, the request begins again: what its disk
then holds belongs to the proposal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from flwr.app import Message

from fedfrozen_app.core.tracing import span
from fedfrozen_app.sites.refusals import RequestRefused


class State(StrEnum):
    RECEIVED = "received"
    CHECKED = "checked"  # its proposal, against policy and budget
    APPROVED = "approved"  # by a person, or by the policy
    ADMITTED = "admitted"  # the request itself, against its proposal, the policy and the limits
    RECALLED = "recalled"  # the site has stored the reply to it before
    PREPARED = "prepared"  # all arrays are here, the noise fits, and no private step is taken yet
    CHARGED = "charged"  # the run's epsilon
    TRAINED = "trained"
    NOISED = "noised"  # and filtered by the policy
    STORED = "stored"  # and its round's epsilon is charged: from here on it may be sent
    MASKED = "masked"
    STEPPED = "stepped"  # the next step of a masked round's protocol is taken
    LOGGED = "logged"  # in the audit log, before it leaves
    SENT = "sent"
    ASKED = "asked"  # for arrays that are not here
    POSTPONED = "postponed"  # outside the site's opening hours: nothing was charged or trained


FINAL = (State.SENT, State.ASKED, State.POSTPONED)


class Progress(Protocol):
    """A request on its way through the states."""

    state: State
    answer: Message | None


P = TypeVar("P", bound=Progress)


@dataclass(frozen=True)
class Transition(Generic[P]):
    before: State
    after: State
    step: Callable[[P], None]
    guard: Callable[[P], str | None]  # why the state after it is not reached; None if it is
    when: Callable[[P], bool] = lambda progress: True  # of several from one state, the first that applies


class NotReached(RequestRefused):
    """A guard found that a step has not done what its state means."""


def advance(table: Sequence[Transition[P]], progress: P) -> None:
    """Take the transition that applies."""
    row = next((row for row in table if row.before is progress.state and row.when(progress)), None)
    if row is None:
        raise NotReached(f"there is no way on from the state {progress.state}")
    with span(row.after.value):
        row.step(progress)
    if problem := row.guard(progress):
        raise NotReached(f"it is not {row.after}: {problem}")
    progress.state = row.after


def process_request(table: Sequence[Transition[P]], progress: P) -> Message:
    """Go through the states until the request is answered."""
    while progress.state not in FINAL:
        advance(table, progress)
    if progress.answer is None:
        raise NotReached("there is no answer")
    return progress.answer
