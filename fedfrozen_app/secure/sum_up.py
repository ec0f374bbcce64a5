"""The server's side of a round: it passes keys and envelopes on, adds vectors up, and takes the masks off.

It keeps one running sum. After every step it counts who is left: with fewer than the threshold the round
fails, and nothing was learned.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedfrozen_app.secure import shares
from fedfrozen_app.secure.client import pair_key
from fedfrozen_app.secure.roster import Entry, Roster, Terms
from fedfrozen_app.secure.round_keys import Pair, derive
from fedfrozen_app.secure.vector import Vector


class TooFew(Exception):
    """The round cannot be finished: why, as a whole clause."""


def new_session() -> str:
    return secrets.token_hex(16)


@dataclass
class Collector:
    """One attempt at a round."""

    terms: Terms
    fewest: int = 2  # clients that the sum must have, beside the threshold
    roster: Roster = field(init=False)
    sum: Vector = field(init=False)
    survivors: list[str] = field(default_factory=list)
    _envelopes: dict[str, dict[str, bytes]] = field(default_factory=dict)  # receiver: sender: envelope
    _senders: list[str] = field(default_factory=list)
    _own: dict[str, dict[str, bytes]] = field(default_factory=dict)  # whose: holder: share
    _keys: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def take_keys(self, entries: Mapping[str, Entry]) -> Roster:
        """Step 1: the roster of those who have sent theirs."""
        if len(entries) < max(2, self.fewest):
            raise TooFew(f"{len(entries)} clients sent keys, and {max(2, self.fewest)} are needed")
        self.roster = Roster(self.terms, tuple(entries[name] for name in sorted(entries)))
        return self.roster

    def take_shares(self, sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Step 2: sender -> its envelopes becomes receiver -> envelopes for it."""
        whole = [name for name, own in sent.items() if set(own) == set(self.roster.neighbours(name))]
        self._count(len(whole), "sent shares")
        self._senders = sorted(whole)
        self._envelopes = {
            name: {other: sent[other][name] for other in self.roster.neighbours(name) if other in whole}
            for name in self._senders
        }
        return self._envelopes

    def expect(self, head: int, body: int) -> None:
        self.sum = Vector.zeros(head, body)

    def take_vector(self, name: str, vector: Vector) -> None:
        """Step 3: a masked vector, which may be forgotten now."""
        self.sum.add(vector)
        self.survivors.append(name)

    def close(self) -> list[str]:
        """Whose vectors are in the sum."""
        self._count(len(self.survivors), "sent a masked update")
        self.survivors.sort()
        return self.survivors

    def take_confirmations(self, count: int) -> None:
        if count < self.roster.needed:
            raise TooFew(f"{count} clients confirmed the sum, and {self.roster.needed} are needed")

    def take_unmasking(self, holder: str, own: Mapping[str, bytes], keys: Mapping[str, bytes]) -> None:
        """Step 4: what one client gave."""
        for found, kept in ((own, self._own), (keys, self._keys)):
            for name, share in found.items():
                kept.setdefault(name, {})[holder] = share

    def finish(self) -> Vector:
        """The sum itself. `TooFew` where a mask cannot be taken off: then nothing of the sum is known."""
        roster, alive = self.roster, set(self.survivors)
        dropped = [name for name in self._senders if name not in alive]
        seeds = {name: self._secret(name, self._own) for name in self.survivors}
        pairs = {name: Pair(self._secret(name, self._keys)) for name in dropped if self._touches(name, alive)}
        for name, pair in pairs.items():
            if pair.public != roster.by_name[name].mask:
                raise TooFew(f"the shares of {name} do not make its key: somebody sent false ones")
        for seed in seeds.values():
            self.sum.mask(derive(seed, roster.digest, "own mask"), subtract=True)
        for name, pair in pairs.items():
            for other in self._envelopes[name]:
                if other in alive:  # it added, or took off, a mask with one whose vector never came
                    self.sum.mask(pair_key(pair, roster, other), subtract=other < name)
        return self.sum

    def _touches(self, name: str, alive: set[str]) -> bool:
        return any(other in alive for other in self._envelopes[name])

    def _secret(self, name: str, found: Mapping[str, Mapping[str, bytes]]) -> bytes:
        holders, needed = self.roster.holders(name), self.roster.shares_needed
        try:
            return shares.combine(found.get(name, {}), holders, needed)
        except ValueError as error:
            raise TooFew(f"the masks of {name} cannot be taken off: {error}") from error

    def _count(self, count: int, did: str) -> None:
        if count < (needed := max(self.roster.needed, self.fewest)):
            raise TooFew(f"{count} clients {did}, and {needed} are needed")
