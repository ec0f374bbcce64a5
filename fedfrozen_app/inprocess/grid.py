"""A Flower grid whose nodes live in this process: nothing is serialised, no port is opened.

`push_messages` receives a round's whole message list, which is where a runner that trains a cohort at once
plugs in. This one runs a client when its reply is asked for, so that one reply at a time is in memory.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.messages import block_replies, read_train
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.local.client_state import given_in, held_at_home, keep_private, kept_arrays
from fedfrozen_app.local.cohort import CohortRunner, cannot_serve
from fedfrozen_app.local.course import Course, Due, Keeping, Payment, Trained
from fedfrozen_app.words import told

log = logging.getLogger(__name__)
CLIENT_FAILED = 2  # Flower's code for an exception in a ClientApp


class InProcessGrid(Grid):
    """`names` are partition numbers; a node's id is its number plus one (0 is the server)."""

    def __init__(self, app: ClientApp, num_partitions: int, run_config: dict[str, str]) -> None:
        # Messages read who sends them from here; without a SuperLink nobody else sets it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
        self._app = app
        self._ids = itertools.count(1)
        self._clients = {partition + 1: str(partition) for partition in range(num_partitions)}
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

    def close(self) -> None:
        """Nothing is asked any more."""

    def _client(self, message: Message) -> str:
        return self._clients[message.metadata.dst_node_id]

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except UserError:
            raise
        except Exception as error:
            log.exception("Client %s failed.", self._client(message))
            return failed(message, error)


class PrivateGrid(InProcessGrid):
    """Lets up to `most` clients of a round take their private steps together: so many replies are in memory.

    `course` is a client's answer but for its steps, which `take_steps` takes.
    """

    def __init__(
        self,
        course: Callable[[Message, Context], Course[Message]],
        take_steps: Callable[[Sequence[Due]], Sequence[Trained]],
        most: int,
        app: ClientApp,
        num_partitions: int,
        run_config: dict[str, str],
    ) -> None:
        super().__init__(app, num_partitions, run_config)
        self._course, self._take_steps, self._most = course, take_steps, most
        self._members: list[str] = []
        self._ready: dict[str, Message] = {}
        self._kept: list[Future[None]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = super().push_messages(messages)
        self._members = [number for number in sent if is_train(self._waiting[number])]
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
        self._wait_for_kept()  # of the round before
        messages = {number: self._waiting.pop(number) for number in members}
        courses = {n: self._course(m, self.contexts[m.metadata.dst_node_id]) for n, m in messages.items()}
        try:
            return self._answers(messages, courses)
        finally:  # whoever keeps a traceback would keep them where they stopped, and their records locked
            for course in courses.values():
                course.close()

    def _answers(
        self, messages: Mapping[str, Message], courses: Mapping[str, Course[Message]]
    ) -> dict[str, Message]:
        found: dict[str, Any] = {
            number: self._advance(messages[number], course.__next__) for number, course in courses.items()
        }
        # A disk takes its time with whoever writes: they need not wait for one another there.
        payments = {number: due.by_itself for number, due in found.items() if isinstance(due, Payment)}
        jobs = {n: self._writers.submit(self._advance, messages[n], pay) for n, pay in payments.items()}
        wait(jobs.values())  # before one of them ends the run, the others have written
        found |= {number: job.result() for number, job in jobs.items()}
        for number in [number for number, due in found.items() if due is None]:  # it has paid
            found[number] = self._advance(messages[number], partial(courses[number].send, None))
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
            go_on = partial(self._advance, messages[number])
            answer = go_on(partial(courses[number].send, its))
            if isinstance(answer, Keeping):
                answer = go_on(answer.beside_others)
                if not isinstance(answer, Message):  # or it could not be prepared
                    self._kept.append(self._writers.submit(self._keep, messages[number], answer))
                    answer = go_on(partial(courses[number].send, None))
            assert isinstance(answer, Message), "a client's private steps are due once in a round"
            replies[number] = answer
        return replies

    @cached_property
    def _writers(self) -> ThreadPoolExecutor:
        """The same in every round: to start a thread takes as long as what it is to do."""
        return ThreadPoolExecutor(self._most, thread_name_prefix="private client")

    def _keep(self, message: Message, work: Callable[[], None]) -> None:
        """Its answer counts whether or not it could be kept."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  (whatever it is: all that it costs is told)
            asked = "asked the same once more, it pays once more"
            why = told(error)
            log.warning("Client %s could not keep its reply (%s): %s.", self._client(message), why, asked)

    def close(self) -> None:
        self._wait_for_kept()

    def _wait_for_kept(self) -> None:
        wait(self._kept)
        self._kept.clear()

    def _advance(self, message: Message, go_on: Callable[[], Any]) -> Any:
        """What is due next, or its reply. A client that fails leaves the others alone."""
        try:
            return go_on()
        except StopIteration as over:
            return over.value
        except UserError:
            raise
        except Exception as error:
            log.exception("Client %s failed.", self._client(message))
            return failed(message, error)


class CohortGrid(InProcessGrid):
    """Trains a round's clients together, in blocks; what the cohort runner cannot serve goes one by one.

    `expected` says who will take part in a round, as far as one can know: their batches are laid out ahead.
    """

    def __init__(
        self,
        app: ClientApp,
        num_partitions: int,
        run_config: dict[str, str],
        runner: CohortRunner,
        expected: Callable[[int], Sequence[str]],
    ) -> None:
        super().__init__(app, num_partitions, run_config)
        self._runner, self._expected = runner, expected
        self._round: Iterator[Message] = iter(())
        self._ready: dict[str, Message] = {}
        self._explained: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self._round = self._train(list(filter(is_train, messages)))
        return super().push_messages(messages)

    def schedule(self, message_ids: Sequence[str]) -> list[list[str]]:
        """The order in which replies come, as clients are through: those of a block come together."""
        if not message_ids:  # the clients have masked what they sent, and answered before
            return []
        order, _ = read_train(self._waiting[message_ids[0]])
        if order.judge or cannot_serve(order):
            return [[message_id] for message_id in message_ids]
        found = {self._client(self._waiting[i]): i for i in message_ids}
        return [[found[client] for client in block] for block in self._runner.through(list(found), order)]

    @property
    def looks_ahead(self) -> bool:
        """Whether it is of use to `foretell` a round."""
        return self._runner.begins_ahead

    def foretell(self, order: Order, arrays: Mapping[str, Tensor]) -> None:
        """This order will probably be the next, with these arrays: its work may begin already. All replies
        to the last one are in."""
        self._round = iter(())  # what it has held is free
        if not cannot_serve(order):
            self._runner.begin(self._expected(order.round), order, arrays)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            while message_id not in self._ready and (reply := next(self._round, None)) is not None:
                self._ready[reply.metadata.reply_to_message_id] = reply
            if message_id in self._ready:
                replies.append(self._ready.pop(message_id))
            else:
                replies += super().pull_messages([message_id])
        return replies

    def _train(self, messages: list[Message]) -> Iterator[Message]:
        """The replies that the cohort runner gives; messages it leaves out wait to be answered one by one."""
        resident = self._runner.resident
        members: dict[str, Message] = {}
        base: dict[str, Tensor] = {}
        given: dict[str, dict[str, Tensor]] = {}
        digests: dict[str, str] = {}  # of the order of each
        # By content, which clients share that lacked the same of the same order: this, and its base; None
        # where something of that is lacking.
        known: dict[int, tuple[Order, dict[str, Tensor]] | None] = {}
        for message in messages:
            client = self._client(message)
            if (content := id(message.content)) in known:
                if (its := known[content]) is not None:
                    members[client], digests[client] = message, its[0].digest
                    if its[0].plan.private:
                        given[client] = given_in(resident, *its)
                continue
            order, sent = read_train(message)
            if order.judge:
                continue
            if reason := cannot_serve(order):
                if reason not in self._explained:
                    self._explained.add(reason)
                    log.info("Clients train one by one, because %s.", reason)
                continue
            at_home = held_at_home(self.contexts[message.metadata.dst_node_id], order, sent)
            found, lacks = resident.cache.complete(order.base, {**at_home, **sent}, verify=False)
            known[content] = None if lacks else (order, found)
            if not lacks:
                base, members[client], digests[client] = found, message, order.digest
                given[client] = given_in(resident, order, found)
        if not members:
            return
        kept: dict[str, dict[str, Tensor]] = {}
        if order.plan.private or order.method.stays:
            homes = {c: self.contexts[message.metadata.dst_node_id] for c, message in members.items()}
            kept = {c: {**kept_arrays(x, resident, order), **given.get(c, {})} for c, x in homes.items()}
        untrained = set(order.plan.private) - set(order.plan.trained)
        common = {name: digest for name, digest in order.base.items() if name not in untrained}
        order, base = replace(order, base=common), {name: base[name] for name in common}
        for place, block in enumerate(self._runner.train(list(members), order, base, kept)):
            # Made while the device still works: their figures are its to tell, and not waited for here.
            for number, client in enumerate(block.clients):
                told = members[client].metadata
                if block.kept or untrained:
                    home = {name: kept[client][name] for name in untrained}
                    own = block.kept[number] if block.kept else {}
                    keep_private(self.contexts[told.dst_node_id], {**home, **own}, local=True)
                self._waiting.pop(told.message_id)
            asked, orders = [members[c] for c in block.clients], [digests[c] for c in block.clients]
            replies = block_replies(block, asked, orders, shared=bool(order.plan.shared))
            if not place and (following := order.round + 1) <= resident.config.num_rounds:
                self._runner.expect(self._expected(following), replace(order, round=following))
            yield from replies


def failed(message: Message, error: Exception) -> Message:
    reason = f"{type(error).__name__}: {error}"
    return Message(Error(code=CLIENT_FAILED, reason=reason), reply_to=message)


def is_train(message: Message) -> bool:
    return message.metadata.message_type == MessageType.TRAIN
