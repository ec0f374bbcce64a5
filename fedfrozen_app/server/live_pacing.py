"""Pacing of real nodes: which requests are in flight, until their replies arrive.

Arrival times cannot be computed: a run's rows record the order of arrival, from which it can be replayed in
one process. A checkpoint contains the requests in flight, and the arrays of earlier versions that they name,
so that a resumed run sends the same requests again.
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
    """Real time: how long a node takes is not known beforehand."""

    def of(
        self, client: str, plan: Plan, down: int, up: int, asked_at: float, most: int | None = None
    ) -> ClientTime:
        raise NotImplementedError("a node takes the time that it takes")

    def steps(self, client: str, plan: Plan) -> int:
        raise NotImplementedError("a node's rows are its own to count")


@dataclass
class InFlight:
    """A request in flight. Its model is that of its own version."""

    asked: ClientRequest
    message_id: str | None  # None: it was lost, and is sent again when its node is back
    sent_at: float  # on the monotonic clock
    due_at: float = 0.0  # of a lost request: the earliest time to send it again
    sent_again: int = 0  # how often, because the node lacked arrays
    crashes: int = 0
    repeated: bool = False  # whether it was sent before: the node may have trained for it
    awaited: Awaited | None = None
    probes: Probes | None = None  # of a site that handles one message after another

    @classmethod
    def of(cls, asked: ClientRequest, message_id: str | None, now: float) -> "InFlight":
        """A request in flight. Copies the mapping of arrays, because the server's changes with its steps."""
        return cls(asked._replace(model=dict(asked.model)), message_id, now)

    @property
    def version(self) -> int:
        return self.asked.request.round

    def lose(self, pause: float) -> None:
        """Mark it as lost by its node. It is sent again after `pause` seconds at the earliest."""
        self.message_id, self.probes, self.repeated = None, None, True
        self.due_at = time.monotonic() + pause

    def assignment(self, now: float) -> Assignment:
        return Assignment(
            self.asked.client, self.version, self.sent_at, ClientTime(0.0, 0.0, 0.0, now - self.sent_at)
        )

    def late(self, reply: Reply | str) -> LateReply:
        """The reply as an update relative to the version it started from. Its bytes are already counted."""
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
    lateness: dict[str, Lateness] = field(default_factory=dict)  # by client, from its own replies
    asked: AskedFile | None = None  # clients of requests since the last checkpoint
    # Until a resumed run's first round: its interrupted requests, and the arrays that they name.
    interrupted: dict[str, TrainRequest] = field(default_factory=dict)
    arrays_then: Mapping[str, Tensor] = field(default_factory=dict)  # by digest

    @property
    def live(self) -> bool:
        return True

    @property
    def at_nodes(self) -> list[InFlight]:
        """Requests that were sent and are not lost."""
        return [flight for flight in self.flights.values() if flight.message_id is not None]

    # Checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        flights = [[client, flight.asked.request.json] for client, flight in self.flights.items()]
        return super().state_dict() | {"requests": flights}

    def arrays(self, held: Collection[str] = ()) -> dict[str, Tensor]:
        """By digest: the requests' arrays of versions other than the checkpoint's model."""
        return {
            digest: flight.asked.model[name]
            for flight in self.flights.values()
            for name, digest in flight.asked.request.base.items()
            if digest not in held
        }

    def load(
        self, state: Mapping[str, Any], arrays: Mapping[str, Tensor], excluded: Collection[str] = ()
    ) -> None:
        """Keep the interrupted requests until the first round, which knows the model and the nodes."""
        if state.get("pacer", {}).get("name") != self.pacer.kind:
            return
        requests = {client: train_request_of(json.loads(text)) for client, text in state.get("requests", ())}
        self.interrupted = {c: request for c, request in requests.items() if c not in excluded}
        self.arrays_then = arrays

    def unknown(self, held: Collection[str]) -> set[str]:
        """The digests in interrupted requests that neither the checkpoint nor `held` has."""
        named = {digest for request in self.interrupted.values() for digest in request.base.values()}
        return named - {*held} - {*self.arrays_then}

    def resumed(self, held: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, InFlight | None]:
        """The interrupted requests, to be sent again; None for one that cannot be rebuilt. `held`: the
        server's arrays by digest; `model`: by name, for arrays that a request does not name."""
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
    """Arrays by name. Equal arrays are copied, because a message's arrays must not share memory."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, digest in base.items():
        found[name] = known[digest].clone() if digest in used else known[digest]
        used.add(digest)
    return found


def live_pacing(config: Config) -> LivePacing | None:
    """The run's live pacing; None for synchronous rounds, which wait for all nodes."""
    pacer = make_pacer(config.pacing, config.seed, config.participation)
    return None if pacer is None else LivePacing(pacer, RealTime())


def wanted_share(share: float | None, asked: int) -> int:
    """The number of replies that closes a round of `asked` requests."""
    return max(1, math.ceil((share or 1.0) * asked - 1e-9))
