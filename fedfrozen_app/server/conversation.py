"""The server's side of the conversation: who is there, and a round of orders and replies over any grid."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode  # internal
from flwr.serverapp import Grid
from torch import Tensor

from fedfrozen_app.digests import digests
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.count import Traffic, bytes_by_role
from fedfrozen_app.exchange.ledger import Ledger
from fedfrozen_app.exchange.messages import (
    REFUSED,
    WAITING,
    Hello,
    Reply,
    alive_message,
    hello_message,
    masking_message,
    masking_text,
    message_to,
    read_hello,
    read_reply,
    train_content,
    train_message,
    with_envelopes,
)
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.models.roles import Role
from fedfrozen_app.secure.layout import Layout
from fedfrozen_app.secure.work import MASKED, problem_of_masked
from fedfrozen_app.secure.work import bytes_by_role as masked_bytes
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
# Seconds until a node is asked again for its hello: after a refusal or an error, doubling; and while people
# at a site decide, which costs the site nothing.
FIRST_PAUSE, PAUSE, WAITING_PAUSE = 2.0, 300.0, 3.0
LOOK = 2.0  # seconds between two looks at who is connected
CRASHES = 2  # of a client's executor over one order: it may not be able to do it at all
# Seconds without an answer after which a site is asked whether it is there: first, and at most.
ALIVE_FIRST, ALIVE_PAUSE = 45.0, 300.0
TRANSFER = 15.0  # seconds that an order may be on its way when a run is stopped


@dataclass(frozen=True)
class ToMask:
    """What a client is to train and mask: its cohort's order, its neighbours' shares, its reply's layout."""

    order: Order
    envelopes: str
    layout: Layout


class Asked(NamedTuple):
    """A message to a client, with its order and all that it may have to be sent."""

    client: str
    node: int
    message_id: str
    order: Order
    model: Mapping[str, Tensor]
    masked: ToMask | None = None


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
    sites: Mapping[int, str] = field(default_factory=dict)  # names of nodes, as the server registered them
    version: str = ""  # of this server: a site that refuses it says which one it allows
    # In which state each client was last seen, as the rest of a sentence.
    seen: dict[str, str] = field(default_factory=dict)
    stop_asked: Callable[[], bool] = lambda: False  # whether somebody wants the run to end
    refusals: dict[int, str] = field(default_factory=dict)  # of nodes that did not say who they are
    waiting: dict[int, str] = field(default_factory=dict)  # sites where a person has yet to approve the run
    # What each side loads for itself, as the server has it, and the clients whose orders must say it.
    foundation: Callable[[], Mapping[str, Tensor]] = dict
    _unfounded: set[str] = field(default_factory=set)
    _foundation_digests: dict[str, str] = field(default_factory=dict)  # once known: it does not change
    _known: dict[int, Hello] = field(default_factory=dict)
    _told: dict[int, str] = field(default_factory=dict)  # what nodes call themselves, taking part or not
    _open: dict[int, tuple[str, float]] = field(default_factory=dict)  # hellos without an answer; their ends
    _pauses: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # when it said no; how long from then
    _online: list[int] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _unanswered: set[str] = field(default_factory=set)  # messages that nodes may still be fetching
    _given_up: set[str] = field(default_factory=set)  # waited for in vain, or said no or not yet
    # Of this round, shared by its messages:
    _contents: dict[tuple[str, ...], tuple[Message, Counter[str], int]] = field(default_factory=dict)

    def greet(self, deadline: float | None = None) -> dict[str, int]:
        """Client names and the node ids they have now; nodes not seen before are asked who they are.

        A node's answer is waited for when it is first asked, until `deadline` or for the hello's time-out.
        From then on a node that stays mute costs nobody's time: its answer is taken whenever it comes.
        """
        online = list(self.grid.get_node_ids())
        if online == self._online:
            return self._names
        now = time.monotonic()
        strangers = [node for node in online if node not in self._known]
        self._open = {node: hello for node, hello in self._open.items() if node in strangers}
        due = [node for node in strangers if self._may_ask(node, now)]
        first = [node for node in due if node not in self._open]  # not one whose hello went by unanswered
        lifetime = with_grace(self.hello_timeout)
        text = self.proposal.text if self.proposal is not None else ""
        sent = self._push([hello_message(node, self.card, lifetime, text) for node in due])
        self._open.update({node: (hello, now + lifetime) for node, hello in zip(due, sent, strict=True)})
        taken = {self._known[node].name for node in online if node in self._known}
        for node in [node for node in strangers if node in self._open]:
            patience = self.hello_timeout if node in first else 0.0
            answer = self._pull(self._open[node][0], now + patience if deadline is None else deadline)
            if answer is None:
                if deadline is None and node in first:
                    log.warning("%s does not answer: going on without it until it does.", self.title(node))
                # One that said no, and was asked again, has still said no.
                self.refusals.setdefault(node, "it is connected, and does not answer")
                continue
            del self._open[node]
            try:
                hello = self._read_hello(answer, taken)
            except ValueError as error:
                log.warning("%s did not say who it is (%s): asking again.", self.title(node), error)
                self.refusals[node] = str(error)
                continue
            self.refusals.pop(node, None)
            self._told[node] = hello.name
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
            self._given_up.discard(hello.name)
            self.seen.setdefault(hello.name, "said hello")
            # A checkpoint's ledger knows better than a simulated node, which starts with nothing.
            if hello.held or not self.ledger.knows(hello.name):
                self.ledger.confirm(hello.name, hello.held)
        self._names = {self._known[node].name: node for node in online if node in self._known}
        # Whoever did not answer is asked again next round.
        self._online = online if len(self._names) == len(online) else []
        return self._names

    def _may_ask(self, node: int, now: float) -> bool:
        """Whether no hello is on its way to it. A site counts questions: one that said no, or has yet to
        decide, is not asked all the time."""
        if node in self._open and now <= self._open[node][1]:
            return False
        when, pause = self._pauses.get(node, (now, 0.0))
        return now - when >= pause

    def _wait(self, node: int, name: str, now: float) -> None:
        if node not in self.waiting and self.proposal is not None:
            log.info(
                "Waiting for a person at the site %s to approve the run: fedfrozen site approve %s",
                *(name, self.proposal.hash),
            )
        self.waiting[node] = name
        self._pauses[node] = (now, WAITING_PAUSE)
        self._given_up.add(name)

    def _take_no(self, node: int, name: str, now: float) -> None:
        self.refusals[node] = f"the site {name} refused; its own log says why"
        self.waiting.pop(node, None)
        _, pause = self._pauses.get(node, (now, FIRST_PAUSE / 2))
        self._pauses[node] = (now, min(2 * pause, PAUSE))
        self._given_up.add(name)
        log.warning("The site %s refused; its own log says why. It is asked again later.", name)

    @property
    def names(self) -> list[str]:
        """The clients that were there when last looked."""
        return list(self._names)

    def present(self) -> dict[str, int]:
        """Who is there for a round. A client that took part before and has gone is waited for, once."""
        deadline, told = time.monotonic() + self.hello_timeout, False
        while True:
            names = self.greet()
            gone = self._gone(names)
            if names and not gone:
                return names
            if not told and not self.local:
                log.warning("Waiting for %s to come back.", ", ".join(gone) or "a client")
                told = True
            if self.local or time.monotonic() > deadline:
                break
            self._pause(0.5)
        self._given_up.update(gone)
        if not names:
            raise RunFailed(f"No client is there any more. {self.who_is_where()}")
        if gone:
            log.warning("Going on without %s. %s", ", ".join(gone), self.who_is_where())
        return names

    def _gone(self, names: Mapping[str, int]) -> list[str]:
        """Who took part in this run, or before it was resumed, and is neither here nor given up."""
        if len(names) == len(self._known) and self.seen.keys() <= names.keys():  # mostly: nobody
            return []
        known = dict.fromkeys([*self.seen, *(hello.name for hello in self._known.values())])
        return [name for name in known if name not in names and name not in self._given_up]

    def title(self, node: int) -> str:
        """What people call this node."""
        name = self._name_of(node)
        return f"Node {node}" if name is None else f"The site {name}" if self.sites else f"Client {name}"

    def _name_of(self, node: int) -> str | None:
        return self.sites.get(node, self._told.get(node))

    def who_is_where(self) -> str:
        """Of every client that ought to be there: whether it is, and in which state it was last seen."""
        online = set(self.grid.get_node_ids())
        texts = []
        for node in dict.fromkeys([*self.sites, *online, *self._known]):
            name = self._name_of(node)
            if node not in online:
                state = "not connected"
            elif node in self.waiting:
                state = "waiting for a person's approval"
            else:
                state = self.refusals.get(node, "connected")
            last = f"; last seen when it {self.seen[name]}" if name in self.seen else ""
            texts.append(f"{self.title(node)}: {state}{last}.")
        if self.version and self.refusals:
            texts.append(f"This server: {self.version}.")
        return " ".join(texts)

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

    def wait_for(
        self,
        count: int,
        timeout: float,
        wanted: int | None = None,
        before: float = 0.0,
        approval_timeout: float = 0.0,
    ) -> dict[str, int]:
        """Greet until at least so many nodes are there, and all that are connected have answered.

        Those that have not by the end are done without; `wanted` is what is asked for in the end. `before`
        are the seconds of the time-out that others have been waited for. Where only people's approval is
        missing, the time-out is `approval_timeout`.
        """
        began, patience = time.monotonic() - before, timeout
        pause = 0.05
        while True:
            # Others may come meanwhile.
            names = self.greet(min(began + patience, time.monotonic() + LOOK))
            waited = time.monotonic() - began
            if len(names) >= count and (waited > timeout or not self._open):
                for node in self._open:
                    log.warning("%s does not answer: going on without it until it does.", self.title(node))
                return names
            undecided = sorted(self.waiting.values())
            only_people = bool(undecided) and len(names) + len(undecided) >= count
            patience = approval_timeout if only_people else timeout
            if waited > patience:
                raise UserError(self._too_few(len(names), wanted or count, undecided, patience))
            self._pause(pause)
            pause = min(2 * pause, 0.5)  # nodes that come at once are not kept waiting

    def _too_few(self, here: int, count: int, undecided: list[str], patience: float) -> str:
        told = self.who_is_where()
        if undecided and self.proposal is not None:
            names = ", ".join(undecided)
            return (
                f"Only {here} of {counted(count, 'node')} take part, and nobody has approved the run at "
                f"{names} within {patience:g} s: ask there for `fedfrozen site approve "
                f"{self.proposal.hash}`, or lower runtime.min_nodes, or raise runtime.approval_timeout. "
                f"{told}"
            )
        return (
            f"Only {here} of {counted(count, 'node')} appeared within {patience:g} s: start the others, or "
            f"lower runtime.min_nodes, or raise runtime.node_timeout. {told}"
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
        given: Mapping[str, Mapping[str, Tensor]] | None = None,
        masked: Mapping[str, ToMask] | None = None,
        meanwhile: Callable[[Reply], None] | None = None,
    ) -> Iterator[tuple[str, Reply | str]]:
        """Send the order to the cohort (name, node) and give each sound reply, or the reason for none.

        `given` are arrays for one client alone, by client: they join the base of its order. Where replies are
        masked, `masked` has each client's own order in place of `order`. Replies come one at a time and in
        the cohort's order, so that sums repeat to the bit and only one reply is in memory, or one block of
        them, whatever the cohort's size. `meanwhile` is told of a block, by one of its replies, before its
        figures are waited for: what it begins on the device is done by then.
        """
        deadline = time.monotonic() + self.timeout
        self._contents = {}
        own, masks = {}, masked or {}
        for client, _ in cohort:
            to_do = masks[client].order if client in masks else order
            its_order, arrays = with_given(to_do, model, (given or {}).get(client))
            own[client] = (
                self._founded(its_order, arrays) if client in self._unfounded else (its_order, arrays)
            )
        messages = []
        for client, node in cohort:
            its_order, arrays = own[client]
            names = self.ledger.missing(client, its_order.base)
            envelopes = masks[client].envelopes if client in masks else ""
            messages.append(self._order_message(node, its_order, names, arrays, traffic, envelopes))
        sent = dict(zip(self._push(messages), cohort, strict=True))
        messages.clear()
        self.seen.update(dict.fromkeys(own, f"was sent the order of round {order.round}"))
        heard, mute = f"answered round {order.round}", f"did not answer round {order.round}"
        # A grid that trains clients together has them ready in an order of its own, a block at a time.
        alone = [[message_id] for message_id in sent]
        for block in self.grid.schedule(list(sent)) if hasattr(self.grid, "schedule") else alone:
            asked = []
            for message_id in block:
                client, node = sent[message_id]
                asked.append(Asked(client, node, message_id, *own[client], masks.get(client)))
            for client, reply in self._answers(asked, traffic, deadline, meanwhile):
                self.seen[client] = mute if isinstance(reply, str) else heard
                yield client, reply
        self._contents = {}

    @property
    def looks_ahead(self) -> bool:
        """Whether the grid begins a round's work before its order comes."""
        return getattr(self.grid, "looks_ahead", False)

    def foretell(self, order: Order, model: Mapping[str, Tensor]) -> None:
        """What the next round will probably be, for a grid that `looks_ahead`. Where another comes, all is as
        if nothing had been said."""
        self.grid.foretell(order, model)  # type: ignore[attr-defined]

    def _answers(
        self,
        asked: Sequence[Asked],
        traffic: Traffic,
        deadline: float,
        meanwhile: Callable[[Reply], None] | None,
    ) -> Iterator[tuple[str, Reply | str]]:
        """What those say who come together. All is read before any of their figures is waited for."""
        heard = [self._answer(one, traffic, deadline) for one in asked]
        pending = (reply for _, reply in heard if isinstance(reply, Reply) and reply.pending is not None)
        if meanwhile is not None and (first := next(pending, None)) is not None:
            meanwhile(first)
        for one, reply in heard:
            yield one.client, self._judged(one, reply)

    def let_finish(self) -> None:
        """Before a run ends under them: nodes to which a message travels may take it in and answer.

        Flower's nodes lose count where a run ends while they fetch its message, and answer the next run with
        this one's reply. Training may take long, and is not waited for.
        """
        until = time.monotonic() + TRANSFER
        while self._unanswered and time.monotonic() < until:
            for message in self.grid.pull_messages(list(self._unanswered)):
                self._unanswered.discard(message.metadata.reply_to_message_id)
            time.sleep(0.2)

    def _answer(self, asked: Asked, traffic: Traffic, deadline: float) -> tuple[Asked, Reply | str]:
        """Its last word, not judged yet, and what it was asked in the end."""
        client, node, message_id, order, model, masked = asked
        envelopes, layout = ("", None) if masked is None else (masked.envelopes, masked.layout)
        message, lost = self._pull_order(node, message_id, deadline)
        crashes = 0
        # A client that was gone has lost its secrets of a masked round, and with them its place in the sum.
        while layout is None and (lost or (message is not None and message.has_error())):
            if message is not None:
                crashes += has_crashed(message)
                if not is_gone(message) and not (has_crashed(message) and crashes <= CRASHES):
                    break
            else:
                log.warning("Client %s is there, and its order was lost with a process of before.", client)
            if (back := self._returned(client, deadline)) is None:
                break
            # What it had begun is lost with it; what it had finished it sends again, and does not do twice.
            node = back
            names = self.ledger.missing(client, order.base)
            (again,) = self._push([self._order_message(node, order, names, model, traffic)])
            message, lost = self._pull_order(node, again, deadline)
        reply = self._read(client, message, order, traffic, layout)
        if client not in self._unfounded and self._asks_for_foundation(reply, order):
            log.info("Client %s has other weights than the federation's: sending these, once.", client)
            self._unfounded.add(client)
            order, model = self._founded(order, model)
            asked = asked._replace(order=order, model=model)
            names = self.ledger.missing(client, order.base)
            (again,) = self._push([self._order_message(node, order, names, model, traffic, envelopes)])
            reply = self._read(client, self._pull(again, deadline), order, traffic, layout)
        # First what it asks for; then everything, which needs no cache at all.
        for everything in (False, True):
            if isinstance(reply, str) or not reply.lacks or reply.order != order.digest:
                break
            wanted = [name for name in order.base if everything or name in reply.lacks]
            lacking = counted(len(reply.lacks), "array")
            log.info("Client %s lacks %s: sending %d.", client, lacking, len(wanted))
            (again,) = self._push([self._order_message(node, order, wanted, model, traffic, envelopes)])
            reply = self._read(client, self._pull(again, deadline), order, traffic, layout)
        return asked, reply

    def _judged(self, asked: Asked, reply: Reply | str) -> Reply | str:
        """A sound reply, ready to be taken; or why there is none."""
        client, _, _, order, model, masked = asked
        if isinstance(reply, str):
            return reply
        if reply.declined:
            return reply.declined
        if reply.lacks:
            return f"still lacks {counted(len(reply.lacks), 'array')} after all were sent"
        if masked is not None:
            if problem := problem_of_masked(reply, order, masked.layout):
                return problem
            self.ledger.confirm(client, order.base_digests)
            return reply
        if order.coder is not None:
            try:
                reply.arrays = order.coder.decode(reply.arrays, model, self.roles)
            except ValueError as error:
                return str(error)
        reply.settle()
        if problem := problem_of(reply, order, model, self.roles):
            return problem
        self.ledger.confirm(client, order.base_digests)
        if not self.local:  # bytes arrive on the host, and the server's model may lie on a GPU
            reply.arrays = {n: tensor.to(model[parameter_of(n)].device) for n, tensor in reply.arrays.items()}
        return reply

    def _founded(self, order: Order, model: Mapping[str, Tensor]) -> tuple[Order, Mapping[str, Tensor]]:
        """The order of a client that must be told what each side was to load for itself."""
        arrays = self.foundation()
        self._foundation_digests = self._foundation_digests or digests(arrays)
        return replace(order, base={**self._foundation_digests, **order.base}), {**arrays, **model}

    def _asks_for_foundation(self, reply: Reply | str, order: Order) -> bool:
        """Whether it lacks what the order says nothing of, because each side was to load it for itself."""
        if isinstance(reply, str) or not reply.lacks or reply.order != order.digest:
            return False
        unsaid = {*reply.lacks} - {*order.base}
        return bool(unsaid) and unsaid <= {*self.foundation()}

    def _order_message(
        self,
        node: int,
        order: Order,
        names: list[str],
        model: Mapping[str, Tensor],
        traffic: Traffic,
        envelopes: str = "",
    ) -> Message:
        # Clients that lack the same are sent the same: nobody changes a message's content.
        if (key := (order.digest, *names)) not in self._contents:
            arrays = {name: model[name] for name in names}
            content = train_content(order, arrays, local=self.local, ticket=self._ticket)
            text = order.json + (canonical(self._ticket) if self._ticket else "")
            message = train_message(node, order, content, ttl=with_grace(self.timeout))
            self._contents[key] = message, bytes_by_role(arrays, self.roles), len(text.encode())
        message, by_role, size = self._contents[key]
        traffic.sent(by_role, size + len(envelopes.encode()))
        message = message_to(node, message)
        if envelopes:
            message.content = with_envelopes(message.content, envelopes)
        return message

    @property
    def _ticket(self) -> dict[str, str] | None:
        """What orders to real sites carry; a simulated node has accepted nothing."""
        return None if self.proposal is None or self.num_partitions() else self.proposal.ticket

    def _returned(self, client: str, deadline: float) -> int | None:
        """The node of a client that was gone, once it is there again; None when it stays away."""
        log.warning("Client %s is gone: waiting for it to come back.", client)
        patience = min(deadline, time.monotonic() + self.hello_timeout)
        while (node := self.greet().get(client)) is None and time.monotonic() < patience:
            self._pause(0.5)
        return node

    def ask(
        self,
        server_round: int,
        members: Sequence[tuple[str, int]],
        texts: Mapping[str, str],
        traffic: Traffic,
        patience: float,
    ) -> list[tuple[str, str | ValueError]]:
        """The answer of each of these clients to its question without arrays, or why there is none."""
        deadline, ticket = time.monotonic() + patience, self._ticket
        messages = [
            masking_message(node, server_round, texts[client], ttl=with_grace(patience), ticket=ticket)
            for client, node in members
        ]
        found: list[tuple[str, str | ValueError]] = []
        for (client, _), message_id in zip(members, self._push(messages), strict=True):
            message, text = self._pull(message_id, deadline), texts[client]
            try:
                if message is None:
                    raise ValueError(f"did not answer within {patience:g} s")
                answer = masking_text(message)
                traffic.asked(text, answer)
                found.append((client, answer))
            except ValueError as error:
                traffic.asked(text, "")
                found.append((client, error))
        return found

    def _read(
        self,
        client: str,
        message: Message | None,
        order: Order,
        traffic: Traffic,
        layout: Layout | None = None,
    ) -> Reply | str:
        if message is None:
            return f"did not answer within {self.timeout:g} s"
        try:
            reply = read_reply(message)
        except ValueError as error:
            return str(error)
        self._anchor(client, reply.anchor)
        if layout is not None and MASKED in reply.arrays and order.masking is not None:
            bits = order.masking.settings["bits"]
            traffic.masked(masked_bytes(layout, bits, self.roles), reply.text)
            return reply
        extra_names = () if order.coder is None else order.coder.extra_names
        traffic.received(reply.arrays, reply.text, self.roles, extra_names)
        return reply

    def _pause(self, seconds: float) -> None:
        if self.stop_asked():
            raise KeyboardInterrupt
        time.sleep(seconds)

    def _push(self, messages: list[Message]) -> list[str]:
        sent = list(self.grid.push_messages(messages)) if messages else []
        if not self.local:
            self._unanswered.update(sent)
        return sent

    def _pull_order(self, node: int, message_id: str, deadline: float) -> tuple[Message | None, bool]:
        """The answer to an order; or that the order is lost, where a site has answered a later question.

        A site works on one message after another. Where its SuperNode was killed with an order and is back
        before the server has missed it, Flower holds that the order is in work, for ever.
        """
        known = self._known.get(node)
        asks = known is not None and bool(known.anchor)  # a site's executor; others may do two things at once
        questions: list[str] = []
        pause = ALIVE_FIRST
        while True:
            message = self._pull(message_id, min(deadline, time.monotonic() + pause if asks else deadline))
            if message is not None or time.monotonic() >= deadline:
                return message, False
            if any(self._pull(question, 0.0) is not None for question in questions):
                # It may have answered both since.
                message = self._pull(message_id, 0.0)
                return message, message is None
            questions += self._push([alive_message(node, with_grace(self.timeout))])
            pause = min(2 * pause, ALIVE_PAUSE)

    def _pull(self, message_id: str, deadline: float) -> Message | None:
        pause = 0.01
        while True:
            for message in self.grid.pull_messages([message_id]):
                self._unanswered.discard(message_id)
                return message
            if time.monotonic() > deadline:
                return None
            self._pause(pause)
            pause = min(2 * pause, 0.5)  # quick rounds are not slowed down, long ones not polled to death


def with_given(
    order: Order, model: Mapping[str, Tensor], given: Mapping[str, Tensor] | None
) -> tuple[Order, Mapping[str, Tensor]]:
    """The order of a client that is given arrays of its own, and all that it may have to be sent."""
    if not given:
        return order, model
    return replace(order, base={**order.base, **digests(given)}), {**model, **given}


def with_grace(timeout: float) -> float:
    """How long Flower keeps a question and its answer.

    Answers are fetched one by one: when the last moment has been spent on one that never came, those of the
    others must still be there. But not for much longer: a client that comes back late would work for nothing.
    """
    return 1.25 * timeout + 60


def is_gone(message: Message) -> bool:
    """Flower answers for a node that has not been heard of for two of its heartbeats."""
    return message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE


def has_crashed(message: Message) -> bool:
    """A node answers so for an executor that was killed or hung, and is being started again; and Flower for
    a node that was killed while it sent its answer."""
    lost = (ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return message.has_error() and message.error.code in lost
