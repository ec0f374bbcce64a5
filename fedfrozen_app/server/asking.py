"""The server's side of a census or a study: send every node a request, and collect answers or failures."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedfrozen_app.census.answers import problem_beside, read_answer
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted, quoted
from fedfrozen_app.exchange.census_messages import CensusReply, census_message, read_census
from fedfrozen_app.exchange.hello_messages import REFUSED, WAITING
from fedfrozen_app.exchange.strict import Spelled
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.membership import WAITING_PAUSE
from fedfrozen_app.server.node_names import problem_of_name
from fedfrozen_app.server.transport import with_grace

log = logging.getLogger(__name__)
POLL = 0.2  # seconds between checks for answers
NO = "it refused; its own log says why"


@dataclass(frozen=True)
class Limits:
    least: int = 1  # nodes to wait for
    timeout: float = 120.0  # seconds, for nodes to connect and to answer
    approval_timeout: float = 0.0  # seconds, for people at a site to decide


@dataclass(frozen=True)
class Question:
    """A request to all nodes, and the parser of its answers."""

    what: str
    message: Callable[[int, float], Message]  # to a node, with its time to live
    read_answer: Callable[[str], Any]  # `ValueError` if invalid
    problem_beside: Callable[[Any, Mapping[str, Any]], str | None] = lambda found, others: None


def census_question(ask: Ask) -> Question:
    return Question(
        "census", lambda node, ttl: census_message(node, ask.text, ttl), read_answer, problem_beside
    )


@dataclass
class NodeStates:
    """The state of each node that was sent the request."""

    open: dict[int, str] = field(default_factory=dict)  # id of the message without an answer yet
    again: dict[int, float] = field(default_factory=dict)  # waits for approval: when to ask again
    done: set[int] = field(default_factory=set)

    def is_due(self, node: int) -> bool:
        """Whether it is time to send this node the request."""
        if node in self.done or node in self.open:
            return False
        return time.monotonic() >= self.again.get(node, 0.0)


@dataclass
class Asking:
    grid: Grid
    ask: Spelled
    question: Question
    limits: Limits = field(default_factory=Limits)
    sites: Mapping[int, str] = field(default_factory=dict)  # names of nodes registered by the server
    anchors: AnchorFile | None = None
    stop_asked: Callable[[], bool] = lambda: False
    only: Collection[int] | None = None  # ask these nodes alone
    answers: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)  # nodes that answered, by name
    refused: dict[str, str] = field(default_factory=dict)
    _states: NodeStates = field(default_factory=NodeStates)

    def run(self) -> None:
        """Run until all connected nodes have answered, or the time-out."""
        began = time.monotonic()
        while True:
            nodes = [node for node in self.grid.get_node_ids() if self.only is None or node in self.only]
            self._push([node for node in nodes if self._states.is_due(node)])
            self._pull()
            waited = time.monotonic() - began
            settled = len(nodes) >= self.limits.least and set(nodes) <= self._states.done
            waits_for_people = bool(self._states.again) and not self._states.open
            if settled or waited > (
                self.limits.approval_timeout if waits_for_people else self.limits.timeout
            ):
                break
            if self.stop_asked():
                raise KeyboardInterrupt
            time.sleep(POLL)
        for node in set(nodes) | set(self.sites if self.only is None else self.only):
            if node not in self._states.done:
                self.refused[self._title(node)] = self._why(node, nodes)
        if len(self._states.done) < self.limits.least and not self.answers:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise UserError(
                f"{counted(len(self._states.done), 'node')} of {self.limits.least} answered within "
                f"{self.limits.timeout:g} s: start the others, or lower runtime.min_nodes. {reasons}"
            )

    def _push(self, nodes: list[int]) -> None:
        if nodes:
            life = with_grace(self.limits.timeout)
            sent = self.grid.push_messages([self.question.message(node, life) for node in nodes])
            self._states.open.update(zip(nodes, sent, strict=True))

    def _pull(self) -> None:
        for node, message_id in list(self._states.open.items()):
            for message in self.grid.pull_messages([message_id]):
                del self._states.open[node]
                try:
                    self._take(node, read_census(message))
                except ValueError as error:
                    self._states.done.add(node)
                    self.refused[self._title(node)] = quoted(str(error))

    def _take(self, node: int, reply: CensusReply) -> None:
        if problem := problem_of_name(node, reply.name, self.sites):
            raise ValueError(problem)
        if self.anchors is not None and reply.anchor:
            self.anchors.add(reply.name, reply.anchor)
        if reply.state == WAITING:
            if node not in self._states.again:
                log.info(
                    "Waiting for a person at the site %s to approve the %s: fedfrozen site approve %s",
                    *(reply.name, self.question.what, self.ask.hash),
                )
            self._states.again[node] = time.monotonic() + WAITING_PAUSE
            return
        self._states.again.pop(node, None)
        self._states.done.add(node)
        if reply.state == REFUSED:
            log.warning("The site %s refused the %s; its own log says why.", reply.name, self.question.what)
            self.refused[reply.name] = NO
            return
        if reply.name in self.answers:
            raise ValueError(f"it calls itself {reply.name}, and so does another node")
        found = self.question.read_answer(reply.json)
        if problem := self.question.problem_beside(found, self.answers):
            raise ValueError(problem)
        self.answers[reply.name] = found
        self.nodes[reply.name] = node

    def _title(self, node: int) -> str:
        return self.sites.get(node, f"node {node}")

    def _why(self, node: int, nodes: list[int]) -> str:
        if node not in nodes:
            return "it is not connected"
        if node in self._states.again:
            return f"nobody there has approved it: fedfrozen site approve {self.ask.hash}"
        return f"it did not answer within {self.limits.timeout:g} s"
