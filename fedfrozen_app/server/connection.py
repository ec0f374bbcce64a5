"""The server's connection to its clients: transport, membership, and the state that all rounds share."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.serverapp import Grid

from fedfrozen_app.config import CodecConfig
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.secure.round_keys import Trust
from fedfrozen_app.server.closed_sites import ClosedSites
from fedfrozen_app.server.coded_broadcast import Broadcast
from fedfrozen_app.server.foundation import Foundation
from fedfrozen_app.server.lateness import Lateness
from fedfrozen_app.server.membership import Invitation, Membership
from fedfrozen_app.server.pacing import Pacing
from fedfrozen_app.server.transport import Transport


@dataclass
class Connection:
    transport: Transport
    membership: Membership
    roles: Mapping[str, Role]
    foundation: Foundation = field(default_factory=Foundation)
    lateness: Lateness = field(default_factory=Lateness)
    closed: ClosedSites = field(default_factory=ClosedSites)
    counts_clients: bool = False  # whether bytes are also counted per client
    pacing: Pacing | None = None  # None: a round waits for all its clients
    codec: CodecConfig = field(default_factory=CodecConfig)  # of uploads and broadcasts
    broadcast: Broadcast = field(default_factory=Broadcast)
    trust: Trust = field(default_factory=Shown)  # verifies signatures of masked rounds' keys

    def nodes_of_round(self) -> Mapping[str, int]:
        """The present clients. Waits for a disconnected node only if rounds wait for all clients."""
        if self.pacing is not None and self.pacing.live:
            return self.membership.greet(time.monotonic()) or self.membership.present()
        return self.membership.present()

    @property
    def ticket(self) -> dict[str, str] | None:
        """The accepted proposal, which requests to real sites contain. Simulated nodes have none."""
        proposal = self.membership.invitation.proposal
        return None if proposal is None or self.membership.num_partitions() else proposal.ticket


def connect(
    grid: Grid,
    roles: Mapping[str, Role],
    *,
    local: bool = False,
    data_spec: Mapping[str, Any] | None = None,
    hello_timeout: float = 120.0,
    excluded: Collection[str] = (),
) -> Connection:
    """A connection with defaults for all else; `local`: server and clients share a process."""
    transport = Transport(grid, local)
    invitation = Invitation(data_spec or {}, hello_timeout)
    return Connection(transport, Membership(transport, invitation, excluded=frozenset(excluded)), roles)
