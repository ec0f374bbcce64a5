"""The server's side of a masked round: forward keys and envelopes, add the vectors, remove the masks.

It keeps one running sum. After every step it counts the remaining clients: below the threshold the round
fails, and the server has learned nothing.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

from fedfrozen_app.secure import shares
from fedfrozen_app.secure.bounds import most_colluders
from fedfrozen_app.secure.client import pair_key
from fedfrozen_app.secure.roster import Entry, Roster, Terms, holders
from fedfrozen_app.secure.round_keys import Pair, commitment, derive
from fedfrozen_app.secure.vector import Vector

log = logging.getLogger(__name__)
TRIES = 200  # sets of holders that are tried until one has given true shares


class TooFew(Exception):
    """The round cannot be finished; the text is a full clause."""


def new_session() -> str:
    return secrets.token_hex(16)


def sets_of(holders: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Subsets of this size: all of them if they are few, else a random sample."""
    if comb(len(holders), size) <= TRIES:
        yield from combinations(holders, size)
        return
    yield tuple(holders[:size])
    for _ in range(TRIES):
        yield tuple(sorted(secrets.SystemRandom().sample(holders, size)))


@dataclass
class Collector:
    """One attempt at a round."""

    terms: Terms
    fewest: int = 2  # clients that the sum must have, in addition to the threshold
    roster: Roster = field(init=False)
    sum: Vector = field(init=False)
    survivors: list[str] = field(default_factory=list)
    false: dict[str, str] = field(default_factory=dict)  # client: how it has broken the protocol
    _drawn: dict[str, frozenset[str]] = field(default_factory=dict)  # sender of shares: their receivers
    _unmasking: set[str] = field(default_factory=set)  # clients that sent any shares
    _doubted: set[str] = field(default_factory=set)  # holders of a share that was false
    _own: dict[str, dict[str, bytes]] = field(default_factory=dict)  # owner: holder: share
    _keys: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def take_keys(self, entries: Mapping[str, Entry]) -> Roster:
        """Step 1: the roster of the clients that sent keys. The caller has checked them."""
        if len(entries) < max(2, self.fewest):
            raise TooFew(f"{len(entries)} clients sent keys, and {max(2, self.fewest)} are needed")
        self.roster = Roster(self.terms, tuple(entries[name] for name in sorted(entries)))
        return self.roster

    def take_shares(self, sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Step 2: sender -> its envelopes becomes receiver -> envelopes for it. A sender's neighbours are the
        receivers of its envelopes."""
        size, names = self.roster.degree, set(self.roster.names)
        self._drawn = {
            name: frozenset(sent[name])
            for name in sorted(sent)
            if len(sent[name]) == size and set(sent[name]) <= names - {name}
        }
        self._count(len(self._drawn), "sent shares")
        return {
            name: {other: sent[other][name] for other, drawn in self._drawn.items() if name in drawn}
            for name in self._drawn
        }

    def present(self, name: str) -> list[str]:
        """The neighbours of this client that have sent shares."""
        return sorted(self._drawn[name] & self._drawn.keys())

    def expect(self, head: int, body: int, bits: int = 32) -> None:
        self.sum = Vector.zeros(head, body, bits)

    def take_vector(self, name: str, vector: Vector) -> None:
        """Step 3: add a masked vector; the caller may drop it."""
        self.sum.add(vector)
        self.survivors.append(name)

    def close(self) -> list[str]:
        """End of step 3: the clients in the sum."""
        self._count(len(self.survivors), "sent a masked update")
        self.survivors.sort()
        return self.survivors

    def take_confirmations(self, count: int) -> None:
        if count < self.roster.needed:
            raise TooFew(f"{count} clients confirmed the sum, and {self.roster.needed} are needed")

    def take_unmasking(self, holder: str, own: Mapping[str, bytes], keys: Mapping[str, bytes]) -> None:
        """Step 4: the shares that one client sent."""
        self._unmasking.add(holder)
        for found, kept in ((own, self._own), (keys, self._keys)):
            for name, share in found.items():
                kept.setdefault(name, {})[holder] = share

    def finish(self) -> Vector:
        """The sum without masks. `TooFew` if a mask cannot be removed: the sum then stays hidden."""
        roster, alive = self.roster, set(self.survivors)
        dropped = [name for name in self._drawn if name not in alive]
        own, keys = self._is_own_mask, self._is_key
        seeds = {name: self._secret(name, self._own, own) for name in self.survivors}
        touched = {name: self._partners(name) & alive for name in dropped}
        pairs = {name: Pair(self._secret(name, self._keys, keys)) for name in dropped if touched[name]}
        for seed in seeds.values():
            self.sum.mask(derive(seed, roster.digest, "own mask"), subtract=True)
        for name, pair in pairs.items():
            for other in touched[name]:  # it has a mask with one whose vector never arrived
                self.sum.mask(pair_key(pair, roster, other), subtract=other < name)
        return self.sum

    def _partners(self, name: str) -> set[str]:
        """The clients with which it shares masks: those that it drew, and those that drew it."""
        return {
            other
            for other, drawn in self._drawn.items()
            if other != name and (name in drawn or other in self._drawn[name])
        }

    def _is_own_mask(self, name: str, seed: bytes) -> bool:
        return commitment(seed) == self.roster.by_name[name].own

    def _is_key(self, name: str, seed: bytes) -> bool:
        return Pair(seed).public == self.roster.by_name[name].mask

    def _secret(
        self,
        name: str,
        found: Mapping[str, Mapping[str, bytes]],
        is_right: Callable[[str, bytes], bool],
    ) -> bytes:
        """Reconstruct a client's secret, even if some of its shares are false."""
        everyone, needed = holders(name, self._drawn[name]), self.roster.shares_needed
        given = {holder: share for holder, share in found.get(name, {}).items() if holder in everyone}
        order = sorted(given, key=lambda holder: (holder in self._doubted, holder))
        for tries, some in enumerate(sets_of(order, needed)):
            seed = shares.combine({holder: given[holder] for holder in some}, everyone, needed)
            if is_right(name, seed):
                if tries:
                    self._doubt(name, seed, given, some, everyone)
                return seed
        self._blame(name, everyone, len(given))
        raise TooFew(
            f"the masks of {name} cannot be taken off: {len(given)} shares are there, {needed} are needed"
            + (", and some of them are false" if len(given) >= needed else "")
        )

    def _doubt(
        self,
        name: str,
        seed: bytes,
        given: Mapping[str, bytes],
        some: Sequence[str],
        everyone: Sequence[str],
    ) -> None:
        """From now on, try holders of false shares last: the holder changed the share, or was dealt a false
        one."""
        for holder in given.keys() - set(some):
            swapped = {one: given[one] for one in (*some[1:], holder)}
            if shares.combine(swapped, everyone, len(some)) != seed:
                self._doubted.add(holder)
                log.warning("Masks: the share of %s that %s gave is false.", name, holder)

    def _blame(self, name: str, everyone: Sequence[str], given: int) -> None:
        """Blame the client itself. Holders give what they can decrypt: if more have answered than colluders
        could account for, and every set of shares was tried, then this client has sealed something else."""
        needed = self.roster.shares_needed
        answered = len(self._unmasking & set(everyone))
        few = most_colluders(len(everyone), self.terms.threshold)
        if answered >= needed + few and (given < needed or comb(given, needed) <= TRIES):
            self.false[name] = "sealed what are no shares of its secrets"

    def _count(self, count: int, did: str) -> None:
        if count < (needed := max(self.roster.needed, self.fewest)):
            raise TooFew(f"{count} clients {did}, and {needed} are needed")
