"""Who takes part in a round, with which keys, and who is whose neighbour.

The roster is the same for all: its digest goes into every key and every ciphertext, so that clients who were
shown different rosters, orders or terms cannot read each other, and their masks do not cancel. Nobody chooses
the neighbours: they follow from the digest.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fedfrozen_app.exchange.strict import canonical, read_json
from fedfrozen_app.secure.round_keys import Trust, digest

MOST, DEPTH, LONGEST = 64_000_000, 6, 8_000  # characters of a text, brackets, characters of a string
COMPLETE = 33  # clients up to which everybody is everybody's neighbour, where nothing else is said
NEIGHBOURS = 32  # of each beyond that
PUBLIC_KEY = 32  # bytes


class Refused(ValueError):
    """Why a client does not go on, as the rest of a sentence for its own log."""


@dataclass(frozen=True)
class Terms:
    """What a round is about: all of it is signed with a client's keys."""

    session: str  # drawn by the server for every attempt at a round
    order: str  # the digest of the order that will be trained
    threshold: float  # share of the shares, and of the cohort, that must be there to unmask
    neighbours: int | None

    @property
    def plain(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "order": self.order,
            "threshold": self.threshold,
            "neighbours": self.neighbours,
        }

    def needed(self, count: int) -> int:
        """Of so many: more than half, whatever is asked for. No two groups of so many are disjoint."""
        return max(count // 2 + 1, min(count, math.ceil(self.threshold * count - 1e-9)))


@dataclass(frozen=True)
class Entry:
    """A client's keys of a round."""

    name: str
    cipher: bytes  # for secrets between two clients
    mask: bytes  # for their masks
    credential: bytes
    signature: bytes

    @property
    def plain(self) -> list[str]:
        return [
            self.name,
            *(to_text(part) for part in (self.cipher, self.mask, self.credential, self.signature)),
        ]

    @classmethod
    def read(cls, found: Any) -> "Entry":
        if not isinstance(found, list) or len(found) != 5 or not all(isinstance(one, str) for one in found):
            raise Refused("the roster has an entry that is none")
        name, *parts = found
        entry = cls(name, *map(to_bytes, parts))
        if not 0 < len(name) <= 100 or {len(entry.cipher), len(entry.mask)} != {PUBLIC_KEY}:
            raise Refused("the roster has an entry that is none")
        return entry


def signed_text(terms: Terms, name: str, cipher: bytes, mask: bytes) -> bytes:
    """What a client signs when it says its keys."""
    said = {**terms.plain, "name": name, "cipher": to_text(cipher), "mask": to_text(mask)}
    return b"fedfrozen round keys " + canonical(said).encode()


@dataclass(frozen=True)
class Roster:
    terms: Terms
    entries: tuple[Entry, ...]  # by name

    @cached_property
    def text(self) -> str:
        return canonical([entry.plain for entry in self.entries])

    @cached_property
    def digest(self) -> bytes:
        return digest([b"roster", canonical(self.terms.plain).encode(), self.text.encode()])

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def needed(self) -> int:
        """Clients whose vectors and whose word a sum must have."""
        return self.terms.needed(len(self.entries))

    @cached_property
    def degree(self) -> int:
        """Neighbours of each client; even in a sparse graph."""
        others, asked = len(self.entries) - 1, self.terms.neighbours
        if asked is None:
            asked = others if others < COMPLETE else NEIGHBOURS
        return others if asked >= others else min(others, asked + asked % 2)

    @cached_property
    def _circle(self) -> tuple[list[str], dict[str, int]]:
        """The clients in an order that the digest draws, and the place of each."""
        seed = np.frombuffer(self.digest, "<u4")
        drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed.tolist())))
        circle = [self.names[number] for number in drawn.permutation(len(self.names))]
        return circle, {name: place for place, name in enumerate(circle)}

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Those who share masks with it and hold its shares: on a drawn circle the nearest on both sides."""
        if name not in self._near:
            self._near[name] = self._neighbours(name)
        return self._near[name]

    @cached_property
    def _near(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _neighbours(self, name: str) -> tuple[str, ...]:
        if self.degree == len(self.entries) - 1:
            return tuple(other for other in self.names if other != name)
        circle, places = self._circle
        half, count = self.degree // 2, len(circle)
        steps = (step for step in range(-half, half + 1) if step)
        return tuple(sorted(circle[(places[name] + step) % count] for step in steps))

    def holders(self, name: str) -> tuple[str, ...]:
        """Those with a share of its secrets: its neighbours and itself."""
        return tuple(sorted((name, *self.neighbours(name))))

    @property
    def shares_needed(self) -> int:
        return self.terms.needed(self.degree + 1)


@lru_cache(maxsize=8)  # every step of every client of one process reads the same
def read_roster(text: str, terms: Terms) -> Roster:
    found = read_strict(text)
    if not isinstance(found, list) or len(found) < 2:
        raise Refused("the roster names nobody else")
    entries = tuple(Entry.read(one) for one in found)
    names = [entry.name for entry in entries]
    if names != sorted(set(names)):
        raise Refused("the roster names somebody twice, or not in order")
    keys = [key for entry in entries for key in (entry.cipher, entry.mask)]
    if len(set(keys)) != len(keys):
        raise Refused("the roster has one key twice")
    return Roster(terms, entries)


def checked_roster(text: str, terms: Terms, trust: Trust) -> Roster:
    """A roster whose every entry was signed by the party that it names, for these terms."""
    roster = _checked(text, terms, trust)
    if isinstance(roster, str):
        raise Refused(roster)
    return roster


@lru_cache(maxsize=4)  # the clients of one process are shown the same
def _checked(text: str, terms: Terms, trust: Trust) -> Roster | str:
    try:
        roster = read_roster(text, terms)
    except Refused as error:
        return str(error)
    for entry in roster.entries:
        said = signed_text(terms, entry.name, entry.cipher, entry.mask)
        if problem := trust.problem(entry.name, entry.credential, said, entry.signature):
            return f"the roster's entry of {entry.name} is not to be believed: {problem}"
    return roster


def survivors_text(roster: Roster, survivors: Sequence[str]) -> bytes:
    """What a client signs when it says whose vectors are in the sum."""
    said = [to_text(roster.digest), sorted(survivors)]
    return b"fedfrozen round survivors " + canonical(said).encode()


# Texts ----------------------------------------------------------------------------------------------------


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refused("it holds bytes that are none") from error


def read_strict(text: str) -> Any:
    """JSON from somebody who is not trusted."""
    try:
        return read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    except Refused:
        raise
    except ValueError as error:
        raise Refused(f"it cannot be read: {error}") from error


def bytes_by_name(found: Any) -> dict[str, bytes]:
    """A mapping from names to bytes."""
    if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
        raise Refused("it does not say bytes by name")
    return {name: to_bytes(value) for name, value in found.items()}


def texts_by_name(given: Mapping[str, bytes]) -> dict[str, str]:
    return {name: to_text(value) for name, value in given.items()}
