"""A Flower grid whose nodes live in this process: nothing is serialised, no port is opened.

`push_messages` receives a round's whole message list, which is where a runner that trains a cohort at once
plugs in. This one runs a client when its reply is asked for, so that one reply at a time is in memory.
"""

import itertools
import logging
from collections.abc import Iterable, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.errors import UserError

log = logging.getLogger(__name__)
CLIENT_FAILED = 2  # Flower's code for an exception in a ClientApp


class InProcessGrid(Grid):
    """`names` are partition numbers; a node's id is its number plus one (0 is the server)."""

    def __init__(self, app: ClientApp, num_partitions: int, run_config: dict[str, str]) -> None:
        # Messages read who sends them from here; without a SuperLink nobody else sets it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
        self._app = app
        self._ids = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        self.contexts = {
            partition + 1: Context(
                run_id=0,
                node_id=partition + 1,
                node_config={
                    "partition-id": partition,
                    "num-partitions": num_partitions,
                    "in-process": True,
                },
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for partition in range(num_partitions)
        }

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

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            message_id = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = message
            sent.append(message_id)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._answer(self._waiting.pop(message_id)) for message_id in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except UserError:
            raise
        except Exception as error:
            log.exception("Client %s failed.", message.metadata.dst_node_id - 1)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(code=CLIENT_FAILED, reason=reason), reply_to=message)
