"""The messages of a SuperNode: one at a time, and each gets a reply or is dropped.

Flower's own state keeps what is left of a run that ended during a transfer: an executor then waits for arrays
that never arrive, or its reply is taken for the reply to the next message. It also waits forever for the
reply of an executor that has ended.
"""

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Error, Message

from fedfrozen_app.core.flower_internals import (
    ErrorCode,
    InMemoryNodeState,
    NodeState,
    NodeStateFactory,
    NoObjectInStoreError,
    ObjectStore,
    ObjectStoreFactory,
    SubStatus,
    Task,
    iterate_object_tree,
    set_message_id,
)
from fedfrozen_app.sites.link import in_time_of

log = logging.getLogger(__name__)
ASK = 10.0  # seconds between two checks whether a run has ended


class Inbox(InMemoryNodeState):
    """The current message and its reply."""

    def __init__(self, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self.run_is_over: Callable[[int], bool] = lambda run: False
        self.sign_of_life: Callable[[], None] = lambda: None  # of the loop that waits for the reply
        self._task: int | None = None
        self._awaited: Message | None = None
        self._until = self._asked = 0.0

    # Called by Flower's loop and the executor ---------------------------------------------------------

    def create_task(self, *given: Any, **named: Any) -> int | None:
        self._task = super().create_task(*given, **named)
        return self._task

    def store_message(self, message: Message) -> str | None:
        if not message.metadata.reply_to_message_id:
            self._awaited, self._asked = message, time.monotonic()
            self._until = time.monotonic() + message.metadata.ttl
        return super().store_message(message)

    def delete_messages(self, *, message_ids: Sequence[str] | None = None) -> None:
        awaited = self._awaited
        if awaited is not None and (message_ids is None or awaited.metadata.message_id in message_ids):
            self._awaited = self._task = None
        super().delete_messages(message_ids=message_ids)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        done = super().finish_task(task_id, sub_status, details)
        if done and sub_status == SubStatus.FAILED and task_id == self._task:
            self._reply_with_error("The executor could not take the message in.")
        return done

    def _on_task_tokens_expired(self, tasks: list[Task]) -> None:
        if self._task in [task.task_id for task in tasks]:
            self._reply_with_error("The executor stopped responding.")

    def get_messages_legacy(
        self,
        *,
        run_ids: Sequence[int] | None = None,
        is_reply: bool | None = None,
        limit: int | None = None,
    ) -> Sequence[Message]:
        """Of replies only the awaited one, once it is complete."""
        if is_reply:
            self.sign_of_life()
            with self.lock_task_store:
                self._cleanup_expired_task_tokens_locked()
            self._drop_unwanted()
            with self.lock_msg_store:
                reply = self._awaited_reply()
            if reply is not None and not self._is_whole(reply):
                return []
        return super().get_messages_legacy(run_ids=run_ids, is_reply=is_reply, limit=limit)

    # Messages and executors that hang ----------------------------------------------------------------

    def abandon(self) -> None:
        """The next message is fetched: drop the last one if it has no reply, because its run has ended."""
        message, task = self._awaited, self._task
        if message is None:
            return
        log.warning("A message was dropped: its run ended during the transfer. It gets no reply.")
        self._drop(message)
        if task is not None:
            self.finish_task(task, SubStatus.FAILED, "Its run ended while its message travelled.")

    def executor_began(self) -> None:
        """A new executor has started: the work of the one before is lost."""
        with self.lock_task_store:
            for record in self.task_token_store.values():
                record.active_until = datetime.datetime.fromtimestamp(0, datetime.UTC)
            self._cleanup_expired_task_tokens_locked()

    def _drop_unwanted(self) -> None:
        """Stop the work on a message whose run has ended or whose deadline has passed."""
        message, now = self._awaited, time.monotonic()
        if message is None:
            return
        if self._has_failed():  # an executor may fail before the message is complete
            self._reply_with_error("The executor could not take the message in.")
        if now < min(self._asked + ASK, self._until):
            return
        self._asked = now
        if now < self._until and not self.run_is_over(message.metadata.run_id):
            return
        log.warning("The server no longer waits for the reply to the current message: it was dropped.")
        if self._task is not None:  # without its task an executor cannot send its reply
            self.finish_task(self._task, SubStatus.FAILED, "Nobody waits for the answer.")
        self._reply_with_error("Nobody waits for the answer.")

    def _has_failed(self) -> bool:
        with self.lock_task_store:
            task = None if self._task is None else self.task_store.get(self._task)
            return task is not None and task.status.sub_status == SubStatus.FAILED

    def _reply_with_error(self, why: str) -> None:
        """Reply to the server, which may send the message again, unless a complete reply is here already."""
        with self.lock_msg_store:
            message = self._awaited
            if message is None:
                return
            reply = self._awaited_reply()
            if reply is not None and self._is_whole(reply):
                return
            if reply is not None:
                self._drop(reply)
            number = message.metadata.message_id
            answer = Message(Error(ErrorCode.CLIENT_APP_CRASHED, why), reply_to=message)
            in_time_of(message, answer)
            set_message_id(answer, answer.object_id)
            self._store_generated_message(answer)
            if number not in self.time_store:  # no executor has taken it
                self.record_message_processing_start(number)
            self.record_message_processing_end(number)
            self.store_message(answer)

    def _awaited_reply(self) -> Message | None:
        """The reply to the current message; replies to other messages are dropped."""
        found, wanted = None, self._awaited.metadata.message_id if self._awaited else None
        for entry in list(self.msg_store.values()):
            answered = entry.message.metadata.reply_to_message_id
            if answered and answered == wanted:
                found = entry.message
            elif answered and not entry.is_retrieved:
                log.warning("A reply to an earlier message was dropped.")
                self._drop(entry.message)
        return found

    def _is_whole(self, reply: Message) -> bool:
        try:
            tree = self.object_store.get_object_tree(reply.metadata.message_id)
        except NoObjectInStoreError:
            return False
        return all(self.object_store.get(part.object_id) for part in iterate_object_tree(tree))

    def _drop(self, message: Message) -> None:
        number = message.metadata.message_id
        self.delete_messages(message_ids=[number])
        self.object_store.delete(number)


class InboxFactory(NodeStateFactory):
    """Gives this inbox to Flower's parts of a SuperNode."""

    def __init__(self) -> None:
        super().__init__(objectstore_factory=ObjectStoreFactory())

    @property
    def inbox(self) -> Inbox:
        with self.lock:
            if self.state_instance is None:
                self.state_instance = Inbox(self.objectstore_factory.store())
            assert isinstance(self.state_instance, Inbox)
            return self.state_instance

    def state(self) -> NodeState:
        return self.inbox
