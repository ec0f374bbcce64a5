"""A part of a round: the clients that one worker trains together, as a request and as a reply.

The division into parts depends only on the cohort and on the number of parts, never on which workers are free
or alive: a run's sums do not depend on which worker trains a part, or when.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.summed import Spec, SumInstructions
from fedfrozen_app.runtimes.ray.packing import Packed


def deal(counts: Sequence[int], parts: int) -> list[list[int]]:
    """Divide clients with `counts` batches into parts: longest first, each into the part with the least
    work."""
    found: list[list[int]] = [[] for _ in range(parts)]
    load = [(0, part) for part in range(parts)]
    for place in sorted(range(len(counts)), key=lambda place: -counts[place]):
        work, part = heapq.heappop(load)
        found[part].append(place)
        heapq.heappush(load, (work + counts[place], part))
    return [sorted(places) for places in found]


@dataclass(frozen=True)
class ClientOrder:
    client: str
    request: int  # which of the part's requests
    state: dict[str, Any]  # its kept state
    envelopes: str = ""  # of a masked round: its neighbours' shares


@dataclass(frozen=True)
class PartOrder:
    """The work of a worker. Requests refer to arrays by digest: `own` has those that the worker may lack and
    no other part needs."""

    requests: tuple[str, ...]  # their texts
    clients: tuple[ClientOrder, ...]
    own: Packed
    sums: SumInstructions | None  # None: each reply is returned with its arrays
    compiling: dict[str, Any] = field(default_factory=dict)  # the decision about compiling steps


@dataclass
class ClientReply:
    """One client's reply. Its arrays are packed, or only specified if they are in the part's sums."""

    client: str
    reply: Reply | None = None  # without its arrays; None: the client failed
    error: str = ""  # why the client failed
    arrays: Packed | None = None
    specs: int | None = None  # which of the part's specifications
    refused: str | None = None  # why it is not in the sums
    norm: float | None = None
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedSums:
    sums: Packed
    weights: dict[str, float]
    squares: Packed
    examples: float
    replies: int


@dataclass
class PartReply:
    replies: list[ClientReply]  # in the order of the request's clients
    specs: list[tuple[Spec, ...]] = field(default_factory=list)
    sums: PackedSums | None = None
    compiling: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[int, str, str]] = field(default_factory=list)  # level, logger and text of warnings
    user_error: str = ""  # a sentence for the user; then nothing else is set
