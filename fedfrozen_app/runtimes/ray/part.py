"""A part of a round: the clients that one worker trains together, as it is sent and as it comes back.

Which clients make a part depends on the cohort and on the number of parts alone, never on which worker is
free or alive: the sums of a run are the same whoever trains a part, and whenever it is done.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.summed import Spec, SumInstructions
from fedfrozen_app.runtimes.ray.packing import Packed


def deal(counts: Sequence[int], parts: int) -> list[list[int]]:
    """Places of clients with `counts` batches, by part: longest first, each where the least work is."""
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
    state: dict[str, Any]  # what it keeps between rounds
    envelopes: str = ""  # of a masked round: its neighbours' shares


@dataclass(frozen=True)
class PartOrder:
    """What a worker is asked to do. Arrays of the requests are known by their digests: `own` has those that
    the worker may lack and no other part needs."""

    requests: tuple[str, ...]  # their texts
    clients: tuple[ClientOrder, ...]
    own: Packed
    sums: SumInstructions | None  # None: each reply comes back with its arrays
    compiling: dict[str, Any] = field(default_factory=dict)  # what was decided about compiled steps


@dataclass
class ClientReply:
    """One client's reply. Its arrays are packed, or only specified where they are in the part's sums."""

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
    replies: list[ClientReply]  # in the order in which the clients were named
    specs: list[tuple[Spec, ...]] = field(default_factory=list)
    sums: PackedSums | None = None
    compiling: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[int, str, str]] = field(default_factory=list)  # level, logger and text of warnings
    user_error: str = ""  # a sentence for the person at the keyboard: nothing else is set then
