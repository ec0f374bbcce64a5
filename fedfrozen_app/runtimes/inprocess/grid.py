"""A Flower grid whose nodes live in this process: nothing is serialised, no port is opened.

A client runs when its reply is pulled, so that one reply at a time is in memory. Grids that train the clients
of a round together (cohort_grid.py, private_grid.py) take the round's messages from `push_messages`.
"""

import itertools
import logging
from collections.abc import Iterable, Sequence

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import ErrorCode, Run, set_message_id, set_sender
from fedfrozen_app.runtimes.inprocess.node_contexts import NodeContexts
from fedfrozen_app.server.local_nodes import GREETED

log = logging.getLogger(__name__)


class InProcessGrid(Grid):
    """Clients are named by partition number; a node's id is its number plus one (0 is the server)."""

    def __init__(self, app: ClientApp, num_partitions: int, run_config: dict[str, str]) -> None:
        set_sender(node_id=0)
        self._app = app
        self._ids = itertools.count(1)
        self.waiting: dict[str, Message] = {}  # pushed, not yet pulled
        self.contexts = NodeContexts(num_partitions, run_config)

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("an in-process grid serves one run, made with it")

    @property
    def run(self) -> Run:
        raise NotImplementedError("an in-process grid has no run of Flower's")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Sequence[int]:
        return list(self.contexts)

    @property
    def known_nodes(self) -> int | None:
        """How many nodes the server knows without a hello; None: it greets each of them."""
        return len(self.contexts) if len(self.contexts) > GREETED else None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        if not self.waiting:  # no client is at work
            self.contexts.trim()
        sent = []
        for message in messages:
            message_id = str(next(self._ids))
            set_message_id(message, message_id)
            self.waiting[message_id] = message
            sent.append(message_id)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.run_client(self.waiting.pop(message_id)) for message_id in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def close(self) -> None:
        """The run has ended: no further message comes."""

    def _client(self, message: Message) -> str:
        return str(message.metadata.dst_node_id - 1)

    def run_client(self, message: Message) -> Message:
        """The reply of the client that this message is for; an error where the client fails."""
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except UserError:
            raise
        except Exception as error:
            log.exception("Client %s failed.", self._client(message))
            return failed(message, error)


def failed(message: Message, error: Exception) -> Message:
    return failed_because(message, f"{type(error).__name__}: {error}")


def failed_because(message: Message, reason: str) -> Message:
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def is_train(message: Message) -> bool:
    return message.metadata.message_type == MessageType.TRAIN
