"""A grid whose clients take their differentially private steps together."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.local.client_coroutine import ClientCoroutine, DueSteps, Payment, ReplyToStore, Trained
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid, failed, is_train

log = logging.getLogger(__name__)


class PrivateGrid(InProcessGrid):
    """Lets up to `most` clients of a round take their private steps together, and holds as many replies.

    `coroutine` is a client's work on a message: it yields where its budget is to be charged, its steps are
    to be taken (by `take_steps`) and its reply is to be kept, and returns the reply.
    """

    def __init__(
        self,
        coroutine: Callable[[Message, Context], ClientCoroutine[Message]],
        take_steps: Callable[[Sequence[DueSteps]], Sequence[Trained]],
        most: int,
        app: ClientApp,
        num_partitions: int,
        run_config: dict[str, str],
    ) -> None:
        super().__init__(app, num_partitions, run_config)
        self._coroutine, self._take_steps, self._most = coroutine, take_steps, most
        self._members: list[str] = []
        self._ready: dict[str, Message] = {}
        self._kept: list[Future[None]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self._wait_for_kept()  # of the round before
        sent = super().push_messages(messages)
        self._members = [number for number in sent if is_train(self.waiting[number])]
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for number in message_ids:
            while number in self._members:
                block, self._members = self._members[: self._most], self._members[self._most :]
                self._ready |= self._train(block)
            known = number in self._ready
            replies += [self._ready.pop(number)] if known else super().pull_messages([number])
        return replies

    def _train(self, members: Sequence[str]) -> dict[str, Message]:
        self._wait_for_kept()  # of the block before
        messages = {number: self.waiting.pop(number) for number in members}
        coroutines = {
            n: self._coroutine(m, self.contexts[m.metadata.dst_node_id]) for n, m in messages.items()
        }
        try:
            return self._replies(messages, coroutines)
        finally:  # a stored traceback would keep them suspended, with their records locked
            for coroutine in coroutines.values():
                coroutine.close()

    def _replies(
        self, messages: Mapping[str, Message], coroutines: Mapping[str, ClientCoroutine[Message]]
    ) -> dict[str, Message]:
        found = self._charge(messages, coroutines)
        replies = {number: reply for number, reply in found.items() if isinstance(reply, Message)}
        due = {number: steps for number, steps in found.items() if number not in replies}
        try:
            trained = dict(zip(due, self._take_steps(list(due.values())), strict=True))
        except UserError:
            raise
        except Exception as error:
            log.exception("Clients that took their steps together failed.")
            return replies | {number: failed(messages[number], error) for number in due}
        for number, its in trained.items():
            replies[number] = self._finish(messages[number], coroutines[number], its)
        return replies

    def _charge(
        self, messages: Mapping[str, Message], coroutines: Mapping[str, ClientCoroutine[Message]]
    ) -> dict[str, Any]:
        """Run each client until its steps, after charging its privacy budget, or until its reply."""
        found: dict[str, Any] = {
            number: self._advance(messages[number], coroutine.__next__)
            for number, coroutine in coroutines.items()
        }
        # A disk is slow to confirm a write: the clients write concurrently.
        payments = {number: due.run_alone for number, due in found.items() if isinstance(due, Payment)}
        jobs = {n: self._writers.submit(self._advance, messages[n], pay) for n, pay in payments.items()}
        wait(jobs.values())  # before one of them ends the run, the others have written
        found |= {number: job.result() for number, job in jobs.items()}
        for number in [number for number, due in found.items() if due is None]:  # it has paid
            found[number] = self._advance(messages[number], partial(coroutines[number].send, None))
        return found

    def _finish(self, message: Message, coroutine: ClientCoroutine[Message], trained: Trained) -> Message:
        """The reply of a client that has taken its steps; it is written to disk while the round continues."""
        advance = partial(self._advance, message)
        reply = advance(partial(coroutine.send, trained))
        if isinstance(reply, ReplyToStore):
            reply = advance(reply.deferred)
            if not isinstance(reply, Message):  # or it could not be prepared
                self._kept.append(self._writers.submit(self._keep, message, reply))
                reply = advance(partial(coroutine.send, None))
        assert isinstance(reply, Message), "a client's private steps are due once in a round"
        return reply

    @cached_property
    def _writers(self) -> ThreadPoolExecutor:
        """The same threads in every round: starting one takes as long as its work."""
        return ThreadPoolExecutor(self._most, thread_name_prefix="private client")

    def _keep(self, message: Message, work: Callable[[], None]) -> None:
        """Keep a client's reply, should the server ask again. The reply counts even if this fails."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  (of any kind: the warning states what it costs)
            asked = "asked the same once more, it pays once more"
            why = format_error(error)
            log.warning("Client %s could not keep its reply (%s): %s.", self._client(message), why, asked)

    def close(self) -> None:
        self._wait_for_kept()

    def _wait_for_kept(self) -> None:
        wait(self._kept)
        self._kept.clear()

    def _advance(self, message: Message, advance: Callable[[], Any]) -> Any:
        """The client's next yield, or its reply. If one client fails, the others continue."""
        try:
            return advance()
        except StopIteration as over:
            return over.value
        except UserError:
            raise
        except Exception as error:
            log.exception("Client %s failed.", self._client(message))
            return failed(message, error)
