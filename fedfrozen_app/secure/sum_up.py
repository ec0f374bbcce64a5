"""The server's side of a masked round: forward keys and envelopes, add the vectors, remove the masks.

It keeps one running sum. After every step it counts the remaining clients: below the threshold the round
fails, and the server has learned nothing.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedfrozen_app.secure import shares
from fedfrozen_app.secure.client import pair_key
from fedfrozen_app.secure.roster import Entry, Roster, Terms, holders
from fedfrozen_app.secure.round_keys import Pair, derive
from fedfrozen_app.secure.vector import Vector


class TooFew(Exception):
    """The round cannot be finished; the text is a whole clause."""


def new_session() -> str:
    return secrets.token_hex(16)


@dataclass
class Collector:
    """One attempt at a round."""

    terms: Terms
    fewest: int = 2  # clients that the sum must have, in addition to the threshold
    roster: Roster = field(init=False)
    sum: Vector = field(init=False)
    survivors: list[str] = field(default_factory=list)
    _drawn: dict[str, frozenset[str]] = field(default_factory=dict)  # of those who sent shares: to whom
    _own: dict[str, dict[str, bytes]] = field(default_factory=dict)  # whose: holder: share
    _keys: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def take_keys(self, entries: Mapping[str, Entry]) -> Roster:
        """Step 1: the roster of the clients that sent keys."""
        if len(entries) < max(2, self.fewest):
            raise TooFew(f"{len(entries)} clients sent keys, and {max(2, self.fewest)} are needed")
        self.roster = Roster(self.terms, tuple(entries[name] for name in sorted(entries)))
        return self.roster

    def take_shares(self, sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Step 2: sender -> its envelopes becomes receiver -> envelopes for it. A sender says its neighbours
        by sending each an envelope."""
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

    def expect(self, head: int, body: int) -> None:
        self.sum = Vector.zeros(head, body)

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
        for found, kept in ((own, self._own), (keys, self._keys)):
            for name, share in found.items():
                kept.setdefault(name, {})[holder] = share

    def finish(self) -> Vector:
        """The sum without masks. `TooFew` if a mask cannot be removed: the sum then stays hidden."""
        roster, alive = self.roster, set(self.survivors)
        dropped = [name for name in self._drawn if name not in alive]
        seeds = {name: self._secret(name, self._own) for name in self.survivors}
        touched = {name: self._partners(name) & alive for name in dropped}
        pairs = {name: Pair(self._secret(name, self._keys)) for name in dropped if touched[name]}
        for name, pair in pairs.items():
            if pair.public != roster.by_name[name].mask:
                raise TooFew(f"the shares of {name} do not make its key: somebody sent false ones")
        for seed in seeds.values():
            self.sum.mask(derive(seed, roster.digest, "own mask"), subtract=True)
        for name, pair in pairs.items():
            for other in touched[name]:  # it has a mask with one whose vector never arrived
                self.sum.mask(pair_key(pair, roster, other), subtract=other < name)
        return self.sum

    def _partners(self, name: str) -> set[str]:
        """Those with which it shares masks: that it drew, and that drew it."""
        return {
            other
            for other, drawn in self._drawn.items()
            if other != name and (name in drawn or other in self._drawn[name])
        }

    def _secret(self, name: str, found: Mapping[str, Mapping[str, bytes]]) -> bytes:
        everyone = holders(name, self._drawn[name])
        try:
            return shares.combine(found.get(name, {}), everyone, self.roster.shares_needed)
        except ValueError as error:
            raise TooFew(f"the masks of {name} cannot be taken off: {error}") from error

    def _count(self, count: int, did: str) -> None:
        if count < (needed := max(self.roster.needed, self.fewest)):
            raise TooFew(f"{count} clients {did}, and {needed} are needed")
