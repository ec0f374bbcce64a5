"""The server's side of a census: every node is asked the same, and what each said or why it did not."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.serverapp import Grid

from fedfrozen_app.census.answers import read_answer
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.messages import REFUSED, WAITING, CensusReply, census_message, read_census
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.conversation import WAITING_PAUSE, with_grace
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
LOOK = 0.2  # seconds between two looks for answers
NO = "it refused; its own log says why"


@dataclass
class Asking:
    grid: Grid
    ask: Ask
    least: int = 1  # nodes that are waited for
    timeout: float = 120.0  # seconds, for nodes to come and to answer
    approval_timeout: float = 0.0  # and for people at a site to decide
    sites: Mapping[int, str] = field(default_factory=dict)  # names of nodes, as the server registered them
    anchors: AnchorFile | None = None
    stop_asked: Callable[[], bool] = lambda: False
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _open: dict[int, str] = field(default_factory=dict)  # by node: the message that has no answer yet
    _again: dict[int, float] = field(default_factory=dict)  # nodes that wait for a person; when to ask again
    _done: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Until all that are connected have answered, or the time is over."""
        began = time.monotonic()
        while True:
            nodes = list(self.grid.get_node_ids())
            self._push([node for node in nodes if self._due(node)])
            self._pull()
            waited = time.monotonic() - began
            settled = len(nodes) >= self.least and set(nodes) <= self._done
            waits_for_people = bool(self._again) and not self._open
            if settled or waited > (self.approval_timeout if waits_for_people else self.timeout):
                break
            if self.stop_asked():
                raise KeyboardInterrupt
            time.sleep(LOOK)
        for node in set(nodes) | set(self.sites):
            if node not in self._done:
                self.refused[self._title(node)] = self._why(node, nodes)
        if len(self._done) < self.least and not self.answers:
            told = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise UserError(
                f"{counted(len(self._done), 'node')} of {self.least} answered within {self.timeout:g} s: "
                f"start the others, or lower runtime.min_nodes. {told}"
            )

    def _due(self, node: int) -> bool:
        if node in self._done or node in self._open:
            return False
        return time.monotonic() >= self._again.get(node, 0.0)

    def _push(self, nodes: list[int]) -> None:
        if nodes:
            life = with_grace(self.timeout)
            sent = self.grid.push_messages([census_message(node, self.ask.text, life) for node in nodes])
            self._open.update(zip(nodes, sent, strict=True))

    def _pull(self) -> None:
        for node, message_id in list(self._open.items()):
            for message in self.grid.pull_messages([message_id]):
                del self._open[node]
                try:
                    self._take(node, read_census(message))
                except ValueError as error:
                    self._done.add(node)
                    self.refused[self._title(node)] = str(error)

    def _take(self, node: int, reply: CensusReply) -> None:
        if self.anchors is not None and reply.anchor:
            self.anchors.add(reply.name, reply.anchor)
        if reply.state == WAITING:
            if node not in self._again:
                log.info(
                    "Waiting for a person at the site %s to approve the census: fedfrozen site approve %s",
                    *(reply.name, self.ask.hash),
                )
            self._again[node] = time.monotonic() + WAITING_PAUSE
            return
        self._again.pop(node, None)
        self._done.add(node)
        if reply.state == REFUSED:
            log.warning("The site %s refused the census; its own log says why.", reply.name)
            self.refused[reply.name] = NO
            return
        if reply.name in self.answers:
            raise ValueError(f"it calls itself {reply.name}, and so does another node")
        self.answers[reply.name] = read_answer(reply.json)

    def _title(self, node: int) -> str:
        return self.sites.get(node, f"node {node}")

    def _why(self, node: int, nodes: list[int]) -> str:
        if node not in nodes:
            return "it is not connected"
        if node in self._again:
            return f"nobody there has approved it: fedfrozen site approve {self.ask.hash}"
        return f"it did not answer within {self.timeout:g} s"
