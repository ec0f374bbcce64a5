"""The server's side of the conversation: who is there, and a round of orders and replies over any grid."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode  # internal
from flwr.serverapp import Grid
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.count import Traffic, bytes_by_role
from fedfrozen_app.exchange.ledger import Ledger
from fedfrozen_app.exchange.messages import (
    REFUSED,
    WAITING,
    Hello,
    Reply,
    hello_message,
    read_hello,
    read_reply,
    train_content,
    train_message,
)
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.models.roles import Role
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
# Seconds until a node is asked again for its hello: after a refusal or an error, doubling; and while people
# at a site decide, which costs the site nothing.
FIRST_PAUSE, PAUSE, WAITING_PAUSE = 2.0, 300.0, 3.0


@dataclass
class Conversation:
    grid: Grid
    roles: Mapping[str, Role]
    card: Mapping[str, Any] = field(default_factory=dict)  # how all must read their data: the hello tells
    ledger: Ledger = field(default_factory=Ledger)
    timeout: float = 3600.0
    local: bool = False  # arrays travel by reference: server and clients share a process
    hello_timeout: float = 120.0
    proposal: Proposal | None = None  # what sites with an executor are asked for
    anchors: AnchorFile | None = None  # where the heads of the sites' audit logs are kept
    refusals: dict[int, str] = field(default_factory=dict)  # of nodes that did not say who they are
    waiting: dict[int, str] = field(default_factory=dict)  # sites where a person has yet to approve the run
    _asked: dict[int, tuple[float, float]] = field(default_factory=dict)  # when, and how long until again
    _known: dict[int, Hello] = field(default_factory=dict)
    _online: list[int] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    # Of this round, shared by its messages:
    _contents: dict[tuple[str, ...], tuple[RecordDict, Counter[str]]] = field(default_factory=dict)

    def greet(self) -> dict[str, int]:
        """Client names and the node ids they have now; nodes not seen before are asked who they are."""
        online = list(self.grid.get_node_ids())
        if online == self._online:
            return self._names
        now = time.monotonic()
        strangers = [node for node in online if node not in self._known and self._may_ask(node, now)]
        lifetime = with_grace(self.hello_timeout)
        text = self.proposal.text if self.proposal is not None else ""
        sent = self._push([hello_message(node, self.card, lifetime, text) for node in strangers])
        deadline = time.monotonic() + self.hello_timeout
        taken = {self._known[node].name for node in online if node in self._known}
        for node, message_id in zip(strangers, sent, strict=True):
            try:
                hello = self._read_hello(self._pull(message_id, deadline), taken)
            except ValueError as error:
                log.warning("Node %s did not say who it is (%s): asking again next round.", node, error)
                self.refusals[node] = str(error)
                continue
            self.refusals.pop(node, None)
            if hello.state == WAITING:
                self._wait(node, hello.name, now)
                continue
            if hello.state == REFUSED:
                self._take_no(node, hello.name, now)
                continue
            if self.waiting.pop(node, None):
                log.info("The site %s has approved the run.", hello.name)
            self._known[node] = hello
            taken.add(hello.name)
            # A checkpoint's ledger knows better than a simulated node, which starts with nothing.
            if hello.held or not self.ledger.knows(hello.name):
                self.ledger.confirm(hello.name, hello.held)
        self._names = {self._known[node].name: node for node in online if node in self._known}
        # Whoever did not answer is asked again next round.
        self._online = online if len(self._names) == len(online) else []
        return self._names

    def _may_ask(self, node: int, now: float) -> bool:
        """A site counts questions: one that said no, or has yet to decide, is not asked all the time."""
        when, pause = self._asked.get(node, (now, 0.0))
        return now - when >= pause

    def _wait(self, node: int, name: str, now: float) -> None:
        if node not in self.waiting and self.proposal is not None:
            log.info(
                "Waiting for a person at the site %s to approve the run: fedfrozen site approve %s",
                *(name, self.proposal.hash),
            )
        self.waiting[node] = name
        self._asked[node] = (now, WAITING_PAUSE)

    def _take_no(self, node: int, name: str, now: float) -> None:
        self.refusals[node] = f"the site {name} refused; its own log says why"
        self.waiting.pop(node, None)
        _, pause = self._asked.get(node, (now, FIRST_PAUSE / 2))
        self._asked[node] = (now, min(2 * pause, PAUSE))
        log.warning("The site %s refused; its own log says why. It is asked again later.", name)

    def _read_hello(self, answer: Message | None, taken: Collection[str]) -> Hello:
        """`ValueError` with a reason where there is none, or where it takes the name of another node."""
        if answer is None:
            raise ValueError("no answer")
        if answer.has_error():
            raise ValueError(answer.error.reason or "no reason given")
        hello = read_hello(answer)
        # Whoever came first keeps the name: a site must not pose as another that is online.
        if hello.name in taken:
            raise ValueError(f"it calls itself {hello.name}, and so does another node")
        self._anchor(hello.name, hello.anchor)
        return hello

    def wait_for(self, count: int, timeout: float, approval_timeout: float = 0.0) -> dict[str, int]:
        """Greet until at least so many nodes are there; longer where only people's approval is missing."""
        began = time.monotonic()
        while True:
            names = self.greet()
            if len(names) >= count:
                return names
            undecided = sorted(self.waiting.values())
            only_people = bool(undecided) and len(names) + len(undecided) >= count
            patience = approval_timeout if only_people else timeout
            if time.monotonic() - began > patience:
                raise UserError(self._too_few(len(names), count, undecided, patience))
            time.sleep(0.5)

    def _too_few(self, here: int, count: int, undecided: list[str], patience: float) -> str:
        told = "".join(f" Node {node}: {reason}." for node, reason in self.refusals.items())
        if undecided and self.proposal is not None:
            names = ", ".join(undecided)
            return (
                f"Only {here} of {counted(count, 'node')} take part, and nobody has approved the run at "
                f"{names} within {patience:g} s: ask there for `fedfrozen site approve "
                f"{self.proposal.hash}`, or lower runtime.min_nodes, or raise runtime.approval_timeout.{told}"
            )
        return (
            f"Only {here} of {counted(count, 'node')} appeared within {patience:g} s: start the others, or "
            f"lower runtime.min_nodes, or raise runtime.node_timeout.{told}"
        )

    def _anchor(self, site: str, digest: str) -> None:
        if digest and self.anchors is not None:
            self.anchors.add(site, digest)

    def num_partitions(self) -> set[int]:
        """Into how many parts the nodes say the data are split; empty for real sites."""
        return {h.num_partitions for h in self._known.values() if h.num_partitions is not None}

    def round(
        self,
        order: Order,
        cohort: Sequence[tuple[str, int]],
        model: Mapping[str, Tensor],
        traffic: Traffic,
    ) -> Iterator[tuple[str, Reply | str]]:
        """Send the order to the cohort (name, node) and give each sound reply, or the reason for none.

        Replies come one at a time and in the cohort's order, so that sums repeat to the bit and only one
        reply is in memory, whatever the cohort's size.
        """
        deadline = time.monotonic() + self.timeout
        self._contents = {}
        messages = []
        for client, node in cohort:
            names = self.ledger.missing(client, order.base)
            messages.append(self._order_message(node, order, names, model, traffic))
        sent = dict(zip(self._push(messages), cohort, strict=True))
        messages.clear()
        # A grid that trains clients together has them ready in an order of its own.
        ready = self.grid.schedule(list(sent)) if hasattr(self.grid, "schedule") else list(sent)
        for message_id in ready:
            client, node = sent[message_id]
            yield client, self._answer(client, node, message_id, order, model, traffic, deadline)
        self._contents = {}

    def _answer(
        self,
        client: str,
        node: int,
        message_id: str,
        order: Order,
        model: Mapping[str, Tensor],
        traffic: Traffic,
        deadline: float,
    ) -> Reply | str:
        message = self._pull(message_id, deadline)
        while message is not None and is_gone(message) and (back := self._returned(client, deadline)):
            # What it had begun is lost with it; what it had finished it sends again, and does not do twice.
            node = back
            names = self.ledger.missing(client, order.base)
            (again,) = self._push([self._order_message(node, order, names, model, traffic)])
            message = self._pull(again, deadline)
        reply = self._read(client, message, order, traffic)
        # First what it asks for; then everything, which needs no cache at all.
        for everything in (False, True):
            if isinstance(reply, str) or not reply.lacks or reply.order != order.digest:
                break
            wanted = [name for name in order.base if everything or name in reply.lacks]
            lacking = counted(len(reply.lacks), "array")
            log.info("Client %s lacks %s: sending %d.", client, lacking, len(wanted))
            (again,) = self._push([self._order_message(node, order, wanted, model, traffic)])
            reply = self._read(client, self._pull(again, deadline), order, traffic)
        if isinstance(reply, str):
            return reply
        if reply.declined:
            return reply.declined
        if reply.lacks:
            return f"still lacks {counted(len(reply.lacks), 'array')} after all were sent"
        if order.coder is not None:
            try:
                reply.arrays = order.coder.decode(reply.arrays, model, self.roles)
            except ValueError as error:
                return str(error)
        if problem := problem_of(reply, order, model, self.roles):
            return problem
        self.ledger.confirm(client, order.base.values())
        if not self.local:  # bytes arrive on the host, and the server's model may lie on a GPU
            reply.arrays = {n: tensor.to(model[parameter_of(n)].device) for n, tensor in reply.arrays.items()}
        return reply

    def _order_message(
        self,
        node: int,
        order: Order,
        names: list[str],
        model: Mapping[str, Tensor],
        traffic: Traffic,
    ) -> Message:
        # Clients that lack the same are sent the same: nobody changes a message's content.
        if (key := tuple(names)) not in self._contents:
            arrays = {name: model[name] for name in names}
            content = train_content(order, arrays, local=self.local, ticket=self._ticket)
            self._contents[key] = content, bytes_by_role(arrays, self.roles)
        content, by_role = self._contents[key]
        traffic.sent(by_role, order.json + (canonical(self._ticket) if self._ticket else ""))
        return train_message(node, order, content, ttl=with_grace(self.timeout))

    @property
    def _ticket(self) -> dict[str, str] | None:
        """What orders to real sites carry; a simulated node has accepted nothing."""
        return None if self.proposal is None or self.num_partitions() else self.proposal.ticket

    def _returned(self, client: str, deadline: float) -> int | None:
        """The node of a client that was gone, once it is there again; None when it stays away."""
        log.warning("Client %s is gone: waiting for it to come back.", client)
        patience = min(deadline, time.monotonic() + self.hello_timeout)
        while (node := self.greet().get(client)) is None and time.monotonic() < patience:
            time.sleep(0.5)
        return node

    def _read(self, client: str, message: Message | None, order: Order, traffic: Traffic) -> Reply | str:
        if message is None:
            return f"did not answer within {self.timeout:g} s"
        try:
            reply = read_reply(message)
        except ValueError as error:
            return str(error)
        self._anchor(client, reply.anchor)
        extra_names = () if order.coder is None else order.coder.extra_names
        traffic.received(reply.arrays, reply.text, self.roles, extra_names)
        return reply

    def _push(self, messages: list[Message]) -> list[str]:
        return list(self.grid.push_messages(messages)) if messages else []

    def _pull(self, message_id: str, deadline: float) -> Message | None:
        pause = 0.01
        while True:
            for message in self.grid.pull_messages([message_id]):
                return message
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.5)  # quick rounds are not slowed down, long ones not polled to death


def with_grace(timeout: float) -> float:
    """How long Flower keeps a question and its answer.

    Answers are fetched one by one: when the last moment has been spent on one that never came, those of the
    others must still be there. But not for much longer: a client that comes back late would work for nothing.
    """
    return 1.25 * timeout + 60


def is_gone(message: Message) -> bool:
    """Flower answers for a node that has not been heard of for two of its heartbeats."""
    return message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE
