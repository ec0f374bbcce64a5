"""Which clients take part: the hello of every node, the names behind node ids, and what each client holds."""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import clock_time, counted, quoted
from fedfrozen_app.exchange.hello_messages import REFUSED, WAITING, Hello, hello_message, read_hello
from fedfrozen_app.exchange.ledger import Ledger
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.local_nodes import LocalNodes
from fedfrozen_app.server.node_names import problem_of_name
from fedfrozen_app.server.node_state import NodeState
from fedfrozen_app.server.transport import Transport, with_grace

log = logging.getLogger(__name__)
# Seconds until a node gets another hello: after a refusal or an error, doubling; and while a site waits for
# approval, which costs the site nothing.
FIRST_PAUSE, PAUSE, WAITING_PAUSE = 2.0, 300.0, 3.0
GONE = "%s is gone since %s (its SuperNode, machine or network): waiting up to %.0f s for it."
MUTE = "it is connected, and does not answer"
POLL = 2.0  # seconds between checks for connected nodes


@dataclass(frozen=True)
class Invitation:
    """What the server sends with the hello, and how long it waits for an answer."""

    data_spec: Mapping[str, Any] = field(default_factory=dict)  # how all clients must read their data
    timeout: float = 120.0
    proposal: Proposal | None = None  # the run proposed to sites with an executor
    version: str = ""  # of this server: a site that refuses it names its allowed version
    to_sites: bool = False  # a deployed run: no simulated nodes

    @property
    def text(self) -> str:
        return self.proposal.text if self.proposal is not None else ""


@dataclass
class Membership:
    transport: Transport
    invitation: Invitation = field(default_factory=Invitation)
    ledger: Ledger = field(default_factory=Ledger)
    anchors: AnchorFile | None = None  # keeps the heads of the sites' audit logs
    sites: Mapping[int, str] = field(default_factory=dict)  # names of nodes registered by the server
    last_state: dict[str, str] = field(default_factory=dict)  # by client: "answered round 3"
    excluded: frozenset[str] = frozenset()  # clients excluded from this run
    _nodes: dict[int, NodeState] = field(default_factory=dict)
    _online: list[int] = field(default_factory=list)
    _names: Mapping[str, int] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)  # timed out, refused, or not approved yet

    # Hello ---------------------------------------------------------------------------------------------

    def greet(self, deadline: float | None = None) -> Mapping[str, int]:
        """Client names and their node ids. Sends a hello to nodes that the server does not know.

        Waits for a new node's answer until `deadline`, or for the hello's time-out. A node that does not
        answer by then costs no more time: its answer is read whenever it arrives.
        """
        if (count := self.transport.known_nodes) is not None:
            if not isinstance(self._names, LocalNodes):
                self._names = LocalNodes(count, self.excluded)
            return self._names
        online = list(self.transport.grid.get_node_ids())
        if online == self._online:
            return self._names
        now = time.monotonic()
        unknown = [node for node in online if self._state(node).hello is None]
        for node in self._nodes.keys() - set(unknown):
            self._nodes[node].open_hello = None
        new = self._send_hellos(unknown, now)
        taken = {hello.name for node in online if (hello := self._nodes[node].hello) is not None}
        for node in unknown:
            if (sent := self._nodes[node].open_hello) is None:
                continue
            patience = self.invitation.timeout if node in new else 0.0
            answer = self.transport.receive(sent[0], now + patience if deadline is None else deadline)
            if answer is not None:
                self._take_answer(node, answer, taken, now)
                continue
            if deadline is None and node in new:
                log.warning("%s does not answer: continuing without it until it does.", self.title(node))
            # A node that refused has still refused while another hello is open.
            self._nodes[node].refusal = self._nodes[node].refusal or MUTE
        known = {hello.name: node for node in online if (hello := self._nodes[node].hello) is not None}
        self._names = {name: node for name, node in known.items() if name not in self.excluded}
        # A node that did not answer gets another hello next round.
        self._online = online if len(known) == len(online) else []
        return self._names

    def _state(self, node: int) -> NodeState:
        return self._nodes.setdefault(node, NodeState())

    def _send_hellos(self, nodes: list[int], now: float) -> set[int]:
        """Send hellos; returns the nodes that had no hello open before."""
        asked = [node for node in nodes if self.sites.get(node) not in self.excluded]
        due = [node for node in asked if self._nodes[node].may_ask(now)]
        new = {node for node in due if self._nodes[node].open_hello is None}
        lifetime = with_grace(self.invitation.timeout)
        data_spec, text = self.invitation.data_spec, self.invitation.text
        sent = self.transport.send([hello_message(node, data_spec, lifetime, text) for node in due])
        for node, message_id in zip(due, sent, strict=True):
            self._nodes[node].open_hello = message_id, now + lifetime
        return new

    def _take_answer(self, node: int, answer: Message, taken: set[str], now: float) -> None:
        state = self._nodes[node]
        state.open_hello = None
        try:
            hello = self._read_hello(node, answer, taken)
        except ValueError as error:
            state.refusal = quoted(str(error))
            log.warning("%s sent no valid hello (%s): asking again.", self.title(node), state.refusal)
            return
        state.refusal, state.name = None, hello.name
        if hello.state == WAITING:
            self._wait_for_approval(state, hello.name, now)
            return
        if hello.state == REFUSED:
            self._take_refusal(state, hello.name, now)
            return
        if state.waiting:
            log.info("The site %s has approved the run.", hello.name)
        elif hello.name in self._given_up:
            log.warning("%s takes part again.", self.called(hello.name))
        state.waiting, state.hello = False, hello
        taken.add(hello.name)
        self._given_up.discard(hello.name)
        self.last_state.setdefault(hello.name, "said hello")
        # A simulated node reports nothing: a checkpoint's ledger is more accurate.
        if hello.held or not self.ledger.knows(hello.name):
            self.ledger.find(hello.name, hello.held)

    def _read_hello(self, node: int, answer: Message, taken: Collection[str]) -> Hello:
        """Parse a hello; `ValueError` if it is unreadable, of the wrong kind, or uses another's name."""
        if answer.has_error():
            raise ValueError(answer.error.reason or "no reason given")
        hello = read_hello(answer, site=self.invitation.to_sites or bool(self.sites))
        if problem := problem_of_name(node, hello.name, self.sites) or self._problem_of_kind(hello):
            raise ValueError(problem)
        # The first node keeps the name: a site must not impersonate another that is online.
        if hello.name in taken:
            raise ValueError(f"it calls itself {hello.name}, and so does another node")
        self.keep_anchor(hello.name, hello.anchor)
        return hello

    def _problem_of_kind(self, hello: Hello) -> str | None:
        """Sites and simulated nodes are never in one run: the second kind to connect would stop the first."""
        if self._first_member is None or (hello.num_partitions is None) == self.of_sites:
            return None
        if hello.num_partitions is None:
            return "it is a site, and the run's other nodes are simulated"
        return "it says that it is a simulated node, and the run's other nodes are sites"

    def _wait_for_approval(self, state: NodeState, name: str, now: float) -> None:
        if not state.waiting and self.invitation.proposal is not None:
            log.info(
                "Waiting for a person at the site %s to approve the run: fedfrozen site approve %s",
                *(name, self.invitation.proposal.hash),
            )
        state.waiting, state.retry = True, (now, WAITING_PAUSE)
        self._given_up.add(name)

    def _take_refusal(self, state: NodeState, name: str, now: float) -> None:
        _, pause = state.retry or (now, FIRST_PAUSE / 2)
        state.refusal = f"the site {name} refused; its own log says why"
        state.waiting, state.retry = False, (now, min(2 * pause, PAUSE))
        self._given_up.add(name)
        log.warning("The site %s refused; its own log says why. It is asked again later.", name)

    def keep_anchor(self, site: str, digest: str) -> None:
        if digest and self.anchors is not None:
            self.anchors.add(site, digest)

    # Present nodes --------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """The clients at the last check."""
        return self._names.keys()

    @property
    def refusals(self) -> dict[int, str]:
        """By node: the reason why it does not take part."""
        return {node: state.refusal for node, state in self._nodes.items() if state.refusal is not None}

    @property
    def waiting(self) -> dict[int, str]:
        """Sites where a person has yet to approve the run."""
        return {node: str(state.name) for node, state in self._nodes.items() if state.waiting}

    @property
    def _members(self) -> dict[int, Hello]:
        return {node: state.hello for node, state in self._nodes.items() if state.hello is not None}

    def num_partitions(self) -> set[int]:
        """The nodes' numbers of partitions; empty for real sites."""
        if isinstance(self._names, LocalNodes):
            return {self._names.count}
        return {h.num_partitions for h in self._members.values() if h.num_partitions is not None}

    @property
    def of_sites(self) -> bool:
        """Whether the nodes are real sites, which may hold arrays from earlier runs. All are of one kind."""
        return self._first_member is not None and self._first_member.num_partitions is None

    @property
    def _first_member(self) -> Hello | None:
        return next((state.hello for state in self._nodes.values() if state.hello is not None), None)

    def has_executor(self, node: int) -> bool:
        """Whether the node is a site with an executor, which handles one message after another."""
        state = self._nodes.get(node)
        return state is not None and state.hello is not None and bool(state.hello.anchor)

    def present(self) -> Mapping[str, int]:
        """The clients for a round. Waits once for a client that took part before and has disconnected."""
        began, missed, local = time.monotonic(), "", self.transport.local
        deadline = began + self.invitation.timeout
        while True:
            names = self.greet()
            gone = self._gone(names)
            if names and not gone:
                if missed:
                    log.warning("All are here again, after %.0f s.", time.monotonic() - began)
                return names
            if not missed and not local:
                missed = ", ".join(gone) or "a client"
                patience = self.invitation.timeout
                log.warning("Waiting since %s for %s, at most %g s.", clock_time(), missed, patience)
            if local or time.monotonic() > deadline:
                break
            self.transport.pause(0.5)
        self._given_up.update(gone)
        if not names:
            raise RunFailed(f"No client is there any more. {self.describe()}")
        if gone:
            log.warning("Continuing without %s. %s", ", ".join(gone), self.describe())
        return names

    def _gone(self, names: Mapping[str, int]) -> list[str]:
        """Clients that took part (also before the run was resumed) and are neither connected nor given up."""
        if isinstance(names, LocalNodes):
            return []
        left = {*names, *self._given_up, *self.excluded}
        return [name for name in self.last_state if name not in left]

    def returned(self, client: str, deadline: float) -> int | None:
        """Wait for a disconnected client and return its node; None if it does not come back in time."""
        if (node := self.greet().get(client)) is not None:
            return node
        began, title = time.monotonic(), self.called(client)
        patience = min(deadline, began + self.invitation.timeout)
        log.warning(GONE, title, clock_time(), patience - began)
        while (node := self.greet().get(client)) is None and time.monotonic() < patience:
            self.transport.pause(0.5)
        waited = time.monotonic() - began
        if node is None:
            log.warning("%s did not come back within %.0f s.", title, waited)
        else:
            log.warning("%s is back after %.0f s: its request is sent again.", title, waited)
        return node

    def wait_for(
        self,
        count: int,
        timeout: float,
        wanted: int | None = None,
        before: float = 0.0,
        approval_timeout: float = 0.0,
    ) -> Mapping[str, int]:
        """Send hellos until at least `count` nodes take part, and all connected ones have answered.

        Nodes that have not answered by the end are left out. `wanted`: the number in the error message.
        `before`: seconds of the time-out already spent. If only approvals are missing, the time-out is
        `approval_timeout`.
        """
        began, patience = time.monotonic() - before, timeout
        pause = 0.05
        while True:
            names = self.greet(min(began + patience, time.monotonic() + POLL))  # more nodes may connect
            waited = time.monotonic() - began
            silent = [node for node, state in self._nodes.items() if state.open_hello is not None]
            if len(names) >= count and (waited > timeout or not silent):
                for node in silent:
                    log.warning("%s does not answer: continuing without it until it does.", self.title(node))
                return names
            undecided = sorted(self.waiting.values())
            only_approvals = bool(undecided) and len(names) + len(undecided) >= count
            patience = approval_timeout if only_approvals else timeout
            if waited > patience:
                raise UserError(self._too_few(len(names), wanted or count, undecided, patience))
            self.transport.pause(pause)
            pause = min(2 * pause, 0.5)  # no long waits for nodes that connect at once

    # Messages ---------------------------------------------------------------------------------------------

    def title(self, node: int) -> str:
        """The name of this node in messages to users."""
        name = self._name_of(node)
        return f"Node {node}" if name is None else f"The site {name}" if self.sites else f"Client {name}"

    def called(self, client: str) -> str:
        """The same for a client's name."""
        return f"The site {client}" if self.sites or self.of_sites else f"Client {client}"

    def _name_of(self, node: int) -> str | None:
        return self.sites.get(node, self._nodes[node].name if node in self._nodes else None)

    def describe(self) -> str:
        """One sentence per expected client: its state, and when it was last connected."""
        online, waiting, refusals = set(self.transport.grid.get_node_ids()), self.waiting, self.refusals
        texts = []
        for node in dict.fromkeys([*self.sites, *online, *self._members]):
            name = self._name_of(node)
            if node not in online:
                state = "not connected"
            elif node in waiting:
                state = "waiting for a person's approval"
            else:
                state = refusals.get(node, "connected")
            last = f"; last seen when it {self.last_state[name]}" if name in self.last_state else ""
            texts.append(f"{self.title(node)}: {state}{last}.")
        if self.invitation.version and refusals:
            texts.append(f"This server: {self.invitation.version}.")
        return " ".join(texts)

    def _too_few(self, here: int, count: int, undecided: list[str], patience: float) -> str:
        states, proposal = self.describe(), self.invitation.proposal
        if undecided and proposal is not None:
            names = ", ".join(undecided)
            return (
                f"Only {here} of {counted(count, 'node')} take part, and nobody has approved the run at "
                f"{names} within {patience:g} s: ask there for `fedfrozen site approve "
                f"{proposal.hash}`, or lower runtime.min_nodes, or raise runtime.approval_timeout. "
                f"{states}"
            )
        return (
            f"Only {here} of {counted(count, 'node')} appeared within {patience:g} s: start the others, or "
            f"lower runtime.min_nodes, or raise runtime.node_timeout. {states}"
        )
