"""The clients of a masked round, their keys, and which of them are neighbours.

All clients must see the same roster: its digest goes into every key and every ciphertext, so that clients
with different rosters, requests or terms cannot decrypt each other's shares, and their masks do not cancel.
Each client draws its own neighbours, after it has seen the roster: no other party influences them, whatever
keys it draws.
"""

import base64
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from fedfrozen_app.exchange.strict import canonical, read_json
from fedfrozen_app.secure.bounds import least_needed, most_colluders
from fedfrozen_app.secure.round_keys import Trust, digest, is_usable

MOST, DEPTH, LONGEST = 64_000_000, 6, 8_000  # characters of a text, brackets, characters of a string
NEIGHBOURS = 160  # that each client draws by default, or all others if fewer
PUBLIC_KEY = 32  # bytes


class ProtocolError(ValueError):
    """A message violates the masking protocol; the text completes a sentence in the client's own log."""


@dataclass(frozen=True)
class Terms:
    """What a client's keys are for; it signs these terms together with its keys."""

    session: str  # drawn by the server for every attempt at a round
    request: str  # the digest of the train request
    round: int
    threshold: float  # fraction of the shares, and of the cohort, that unmasking needs
    neighbours: int | None

    @property
    def plain(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "order": self.request,
            "round": self.round,
            "threshold": self.threshold,
            "neighbours": self.neighbours,
        }

    def needed(self, count: int) -> int:
        return least_needed(count, self.threshold)


@dataclass(frozen=True)
class Entry:
    """A client's keys of a round."""

    name: str
    cipher: bytes  # public key for encryption between two clients
    mask: bytes  # public key for masks
    own: bytes  # commitment to the seed of its own mask: shares of that can be false
    credential: bytes
    signature: bytes

    @property
    def plain(self) -> list[str]:
        return [
            self.name,
            *map(to_text, (self.cipher, self.mask, self.own, self.credential, self.signature)),
        ]

    @classmethod
    def read(cls, found: Any) -> "Entry":
        if not isinstance(found, list) or len(found) != 6 or not all(isinstance(one, str) for one in found):
            raise ProtocolError("the roster has an entry that is none")
        name, *parts = found
        entry = cls(name, *map(to_bytes, parts))
        sizes = {len(entry.cipher), len(entry.mask), len(entry.own)}
        if not 0 < len(name) <= 100 or sizes != {PUBLIC_KEY}:
            raise ProtocolError("the roster has an entry that is none")
        return entry


def signed_text(terms: Terms, name: str, cipher: bytes, mask: bytes, own: bytes) -> bytes:
    """What a client signs when it sends its public keys."""
    keys = {"cipher": to_text(cipher), "mask": to_text(mask), "own": to_text(own)}
    return b"fedfrozen round keys " + canonical({**terms.plain, "name": name, **keys}).encode()


def problem_of_entry(entry: Entry, terms: Terms, trust: Trust) -> str | None:
    """Why no client would accept a roster with this entry."""
    signed = signed_text(terms, entry.name, entry.cipher, entry.mask, entry.own)
    if problem := trust.problem(entry.name, entry.credential, signed, entry.signature):
        return problem
    return None if is_usable(entry.cipher) and is_usable(entry.mask) else "a key of its is none"


def repeated_keys(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with a key that occurs twice. Keys are random: all these clients are dishonest, unless the
    server showed one client's key to another before the roster."""
    known = list(entries)
    count = Counter(key for entry in known for key in (entry.cipher, entry.mask))
    return [entry for entry in known if max(count[entry.cipher], count[entry.mask]) > 1]


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
        """The number of clients that must be in a sum and must confirm it."""
        return self.terms.needed(len(self.entries))

    @property
    def colluders(self) -> int:
        """The number of clients that may collude with the server."""
        return most_colluders(len(self.entries), self.terms.threshold)

    @property
    def degree(self) -> int:
        """The number of neighbours that each client draws."""
        return min(len(self.entries) - 1, self.terms.neighbours or NEIGHBOURS)

    def draw(self, name: str) -> tuple[str, ...]:
        """Draw random neighbours for this client; they will hold shares of its secrets."""
        others = [other for other in self.names if other != name]
        return tuple(sorted(secrets.SystemRandom().sample(others, self.degree)))

    @property
    def shares_needed(self) -> int:
        return self.terms.needed(self.degree + 1)


def holders(name: str, neighbours: Iterable[str]) -> tuple[str, ...]:
    """The clients with a share of this one's secrets: its neighbours and itself."""
    return tuple(sorted((name, *neighbours)))


@lru_cache(maxsize=8)  # all clients of one process read the same text in every step
def read_roster(text: str, terms: Terms) -> Roster:
    found = read_strict(text)
    if not isinstance(found, list) or len(found) < 2:
        raise ProtocolError("the roster names nobody else")
    entries = tuple(Entry.read(one) for one in found)
    names = [entry.name for entry in entries]
    if names != sorted(set(names)):
        raise ProtocolError("the roster names somebody twice, or not in order")
    if repeated_keys(entries):
        raise ProtocolError("the roster has one key twice")
    return Roster(terms, entries)


def checked_roster(text: str, terms: Terms, trust: Trust) -> Roster:
    """A roster in which each entry is signed, for these terms, by the party that it names."""
    roster = _checked(text, terms, trust)
    if isinstance(roster, str):
        raise ProtocolError(roster)
    return roster


@lru_cache(maxsize=4)  # the clients of one process check the same texts
def _checked(text: str, terms: Terms, trust: Trust) -> Roster | str:
    try:
        roster = read_roster(text, terms)
    except ProtocolError as error:
        return str(error)
    for entry in roster.entries:
        if problem := problem_of_entry(entry, terms, trust):
            return f"the roster's entry of {entry.name} is not to be believed: {problem}"
    return roster


def survivors_text(roster: Roster, survivors: Sequence[str]) -> bytes:
    """What a client signs to confirm the list of clients in the sum."""
    content = [to_text(roster.digest), sorted(survivors)]
    return b"fedfrozen round survivors " + canonical(content).encode()


# Texts ----------------------------------------------------------------------------------------------------


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ProtocolError("it holds bytes that are none") from error


def read_strict(text: str) -> Any:
    """JSON from an untrusted sender."""
    try:
        return read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    except ProtocolError:
        raise
    except ValueError as error:
        raise ProtocolError(f"it cannot be read: {error}") from error


def bytes_by_name(found: Any) -> dict[str, bytes]:
    """A mapping from names to bytes."""
    if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
        raise ProtocolError("it does not say bytes by name")
    return {name: to_bytes(value) for name, value in found.items()}


def texts_by_name(given: Mapping[str, bytes]) -> dict[str, str]:
    return {name: to_text(value) for name, value in given.items()}
