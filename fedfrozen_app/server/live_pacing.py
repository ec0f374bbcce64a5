"""Pacing of nodes that take real time: who is at work on which request, until a reply arrives.

What arrives when is nobody's to compute: a run has the order of arrival in its rows, by which it can be
replayed in one process. A checkpoint holds the requests that nodes are at work on, and the arrays of earlier
versions that these name, so that a resumed run sends the very same requests again.
"""

import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.config import Config
from fedfrozen_app.exchange.count import Upload
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import namespace_of
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest, train_request_of
from fedfrozen_app.server.asked_file import AskedFile
from fedfrozen_app.server.late_replies import LateReply
from fedfrozen_app.server.lateness import Awaited, Lateness
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.pacing import Pacing
from fedfrozen_app.server.request_messages import ClientRequest
from fedfrozen_app.server.transport import Probes


class RealTime:
    """Nobody knows beforehand how long a node takes."""

    def of(
        self, client: str, plan: Plan, down: int, up: int, asked_at: float, most: int | None = None
    ) -> ClientTime:
        raise NotImplementedError("a node takes the time that it takes")

    def steps(self, client: str, plan: Plan) -> int:
        raise NotImplementedError("a node's rows are its own to count")


@dataclass
class InFlight:
    """A request that a node is at work on. Its model is that of the version it starts from."""

    asked: ClientRequest
    message_id: str | None  # None: it was lost, and is sent again when its node is there
    sent_at: float  # on the monotonic clock
    due_at: float = 0.0  # of one that was lost: when it is sent again, at the earliest
    sent_again: int = 0  # how often, for arrays that the node lacked
    crashes: int = 0
    repeated: bool = False  # whether it was sent before: the node may have trained for it
    awaited: Awaited | None = None
    probes: Probes | None = None  # of a site that handles one message after another

    @classmethod
    def of(cls, asked: ClientRequest, message_id: str | None, now: float) -> "InFlight":
        """The mapping of its arrays is copied, because the server's own follows its steps."""
        return cls(asked._replace(model=dict(asked.model)), message_id, now)

    @property
    def version(self) -> int:
        return self.asked.request.round

    def lose(self, pause: float) -> None:
        """Its node has it no more. It is sent again after so many seconds at the earliest."""
        self.message_id, self.probes, self.repeated = None, None, True
        self.due_at = time.monotonic() + pause

    def assignment(self, now: float) -> Assignment:
        return Assignment(
            self.asked.client, self.version, self.sent_at, ClientTime(0.0, 0.0, 0.0, now - self.sent_at)
        )

    def late(self, reply: Reply | str) -> LateReply:
        """The reply as the update that it makes of the version it started from. Its bytes are counted."""
        if isinstance(reply, Reply):
            reply = replace(reply, arrays=self._update_of(reply.arrays), text="")
        return LateReply(reply, Upload())

    def _update_of(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        base = self.asked.model
        return {
            name: value.clone() if namespace_of(name) else value - base[name]
            for name, value in arrays.items()
        }


@dataclass
class LivePacing(Pacing):
    flights: dict[str, InFlight] = field(default_factory=dict)  # by client: each has one request at a time
    lateness: dict[str, Lateness] = field(default_factory=dict)  # by client: each is late by its own replies
    asked: AskedFile | None = None  # who was asked since the last checkpoint
    # Of the run that is resumed, until its first round: its requests at work, and what they name.
    interrupted: dict[str, TrainRequest] = field(default_factory=dict)
    arrays_then: Mapping[str, Tensor] = field(default_factory=dict)  # by digest

    @property
    def live(self) -> bool:
        return True

    @property
    def at_nodes(self) -> list[InFlight]:
        """Requests that were sent and not lost."""
        return [flight for flight in self.flights.values() if flight.message_id is not None]

    # Checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        flights = [[client, flight.asked.request.json] for client, flight in self.flights.items()]
        return super().state_dict() | {"requests": flights}

    def arrays(self, held: Collection[str] = ()) -> dict[str, Tensor]:
        """By digest: what the requests name of versions other than that of the checkpoint's model."""
        return {
            digest: flight.asked.model[name]
            for flight in self.flights.values()
            for name, digest in flight.asked.request.base.items()
            if digest not in held
        }

    def load(
        self, state: Mapping[str, Any], arrays: Mapping[str, Tensor], excluded: Collection[str] = ()
    ) -> None:
        """Keep them until the first round, which knows the model and the nodes."""
        if state.get("pacer", {}).get("name") != self.pacer.kind:
            return
        requests = {client: train_request_of(json.loads(text)) for client, text in state.get("requests", ())}
        self.interrupted = {c: request for c, request in requests.items() if c not in excluded}
        self.arrays_then = arrays

    def unknown(self, held: Collection[str]) -> set[str]:
        """The digests that the interrupted requests name, and that neither the checkpoint nor `held` has."""
        named = {digest for request in self.interrupted.values() for digest in request.base.values()}
        return named - {*held} - {*self.arrays_then}

    def resumed(self, held: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, InFlight | None]:
        """The interrupted requests, to be sent again; None for one that cannot be made again. `held`: the
        arrays that the server has, by digest; `model`: by name, for what a request does not name."""
        known = {**self.arrays_then, **held}
        found: dict[str, InFlight | None] = {}
        for client, request in self.interrupted.items():
            if not all(digest in known for digest in request.base.values()):
                found[client] = None
                continue
            base = arrays_named(request.base, known)
            asked = ClientRequest(client, 0, request, {**model, **base})
            found[client] = replace(InFlight.of(asked, None, time.monotonic()), repeated=True)
        self.interrupted, self.arrays_then = {}, {}
        return found


def arrays_named(base: Mapping[str, str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name. Equal arrays get memory of their own each: a message's arrays must not share it."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, digest in base.items():
        found[name] = known[digest].clone() if digest in used else known[digest]
        used.add(digest)
    return found


def live_pacing(config: Config) -> LivePacing | None:
    """None for synchronous rounds, which wait for all nodes."""
    pacer = make_pacer(config.pacing, config.seed, config.participation)
    return None if pacer is None else LivePacing(pacer, RealTime())


def wanted_share(share: float | None, asked: int) -> int:
    """How many replies close a round of so many requests."""
    return max(1, math.ceil((share or 1.0) * asked - 1e-9))
