"""Messages over any Flower grid: send, wait for replies, detect lost ones."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from fedfrozen_app.core.flower_internals import ErrorCode
from fedfrozen_app.exchange.hello_messages import alive_message
from fedfrozen_app.exchange.summed import SumInstructions
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server.lateness import Awaited

# Seconds without a reply until a site is probed: initial and maximum interval.
ALIVE_FIRST, ALIVE_PAUSE = 45.0, 300.0
TRANSFER = 15.0  # seconds for messages in transfer when a run is stopped


@dataclass
class Transport:
    grid: Grid
    local: bool = False  # arrays are passed by reference: server and clients share a process
    timeout: float = 3600.0  # seconds for the replies of a round
    stop_requested: Callable[[], bool] = lambda: False  # whether the run should end
    on_wait: Callable[[], None] = lambda: None  # called repeatedly while waiting
    _unanswered: set[str] = field(default_factory=set)  # messages that nodes may still be fetching

    @property
    def lifetime(self) -> float:
        """How long Flower keeps a message of a round."""
        return with_grace(self.timeout)

    def send(self, messages: list[Message]) -> list[str]:
        """Send messages; returns their ids."""
        sent = list(self.grid.push_messages(messages)) if messages else []
        if not self.local:
            self._unanswered.update(sent)
        return sent

    def receive(self, message_id: str, deadline: float) -> Message | None:
        """The reply to this message; None if there is none by the deadline."""
        pause = 0.01
        while True:
            for message in self.grid.pull_messages([message_id]):
                self._unanswered.discard(message_id)
                return message
            if time.monotonic() > deadline:
                return None
            self.pause(pause)
            pause = min(2 * pause, 0.5)  # no delay of short rounds, few polls in long ones

    def receive_or_lost(
        self, node: int, message_id: str, deadline: float, *, probe: bool, awaited: Awaited
    ) -> tuple[Message | None, bool]:
        """The reply to a train request, and whether the request is lost: the site answered a later message.

        A site handles messages in order. If its SuperNode is killed while it handles a request, and is back
        before the server notices, Flower considers the request in progress forever. `probe`: send such later
        messages, and warn the operator of a late reply.
        """
        probes = Probes(self, node)
        while True:
            until = min(deadline, probes.due_at, awaited.late_at) if probe else deadline
            message = self.receive(message_id, until)
            now = time.monotonic()
            if message is not None or now >= deadline:
                return message, False
            if now >= awaited.late_at:
                awaited.warn_late()
            if probes.answered(now):
                message = self.receive(message_id, 0.0)  # it may have answered both since
                return message, message is None

    def blocks(self, message_ids: Sequence[str]) -> list[list[str]]:
        """The order in which to fetch replies, by block if the grid trains clients together."""
        if hasattr(self.grid, "schedule"):
            found: list[list[str]] = self.grid.schedule(list(message_ids))
            return found
        return [[message_id] for message_id in message_ids]

    @property
    def known_nodes(self) -> int | None:
        """The number of nodes of a grid in this process, if they are too many for hellos."""
        found: int | None = getattr(self.grid, "known_nodes", None) if self.local else None
        return found

    @property
    def can_prefetch(self) -> bool:
        """Whether the grid can start a round's work before its requests are sent."""
        return getattr(self.grid, "can_prefetch", False)

    def prefetch(self, request: TrainRequest, model: Mapping[str, Tensor]) -> None:
        """Predict the next round for a grid that can prefetch. A wrong prediction changes no result."""
        self.grid.prefetch(request, model)  # type: ignore[attr-defined]

    def sum_replies(self, how: SumInstructions | None) -> None:
        """Set whether and how the next replies may be summed where clients train, for a grid that can do
        that; others send them one by one."""
        if hasattr(self.grid, "sum_replies"):
            self.grid.sum_replies(how)

    def pause(self, seconds: float) -> None:
        if self.stop_requested():
            raise KeyboardInterrupt
        self.on_wait()
        time.sleep(seconds)

    def drain(self) -> None:
        """Before a run is stopped: give nodes time to finish fetching a message, and to answer it.

        A Flower node that is fetching a message when its run ends answers the next run with this one's reply.
        Does not wait for training, which may take long.
        """
        until = time.monotonic() + TRANSFER
        while self._unanswered and time.monotonic() < until:
            for message in self.grid.pull_messages(list(self._unanswered)):
                self._unanswered.discard(message.metadata.reply_to_message_id)
            time.sleep(0.2)


class Probes:
    """Later messages to a site with a missing reply, at growing intervals: an answer to one of them shows
    that the site has lost the request."""

    def __init__(self, transport: Transport, node: int) -> None:
        self._transport, self._node, self._pause = transport, node, ALIVE_FIRST
        self._sent: list[str] = []
        self.due_at = time.monotonic() + self._pause

    def answered(self, now: float) -> bool:
        """Whether one of them is answered; sends another after the interval."""
        if now < self.due_at:
            return False
        if any(self._transport.receive(sent, 0.0) is not None for sent in self._sent):
            return True
        self._sent += self._transport.send([alive_message(self._node, self._transport.lifetime)])
        self._pause = min(2 * self._pause, ALIVE_PAUSE)
        self.due_at = time.monotonic() + self._pause
        return False


def with_grace(timeout: float) -> float:
    """How long Flower keeps a message and its reply.

    Replies are fetched one by one. If one of them takes the whole time-out, the others must still exist
    afterwards; but not much longer, or a client that comes back late would train in vain.
    """
    return 1.25 * timeout + 60


def is_gone(message: Message) -> bool:
    """Whether this is Flower's answer for a node that has missed two heartbeats."""
    return message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE


def has_crashed(message: Message) -> bool:
    """Whether the node's executor was killed or hung and is being restarted, or the node was killed while it
    sent its reply."""
    lost = (ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return message.has_error() and message.error.code in lost
