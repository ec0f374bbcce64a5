"""Pacing of nodes that take real time: who is at work on which request, until a reply arrives.

What arrives when is nobody's to compute: a run has the order of arrival in its rows, by which it can be
replayed in one process. A request that is on its way when the server ends is lost to it; the run that resumes
begins with everybody free.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.config import Config
from fedfrozen_app.exchange.count import Upload
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import namespace_of
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server.late_replies import LateReply
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.pacing import Pacing
from fedfrozen_app.server.request_messages import ClientRequest


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
    message_id: str
    sent_at: float  # on the monotonic clock
    sent_again: int = 0  # how often, for arrays that the node lacked

    @classmethod
    def of(cls, asked: ClientRequest, message_id: str, now: float) -> "InFlight":
        """The mapping of its arrays is copied, because the server's own follows its steps."""
        return cls(asked._replace(model=dict(asked.model)), message_id, now)

    @property
    def version(self) -> int:
        return self.asked.request.round

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

    @property
    def live(self) -> bool:
        return True


def live_pacing(config: Config) -> LivePacing | None:
    """None for synchronous rounds, which wait for all nodes."""
    pacer = make_pacer(config.pacing, config.seed, config.participation)
    return None if pacer is None else LivePacing(pacer, RealTime())


def wanted_share(share: float | None, asked: int) -> int:
    """How many replies close a round of so many requests."""
    return max(1, math.ceil((share or 1.0) * asked - 1e-9))
