"""A client's side of a round: four steps, in this order, each once. What does not fit is refused.

    keys      it draws its keys and a seed for a mask of its own, and signs its public keys
    shares    it checks the roster, and gives every neighbour a share of its two secrets, encrypted
    mask      it opens its neighbours' shares, and masks its vector: its own mask, and one with each neighbour
    unmask    it first signs whose vectors are in the sum (confirm), and once enough others have signed the
              same, it gives for each neighbour a share of one of its two secrets: of its own mask where it is
              in the sum, of its key where it dropped out; never both

Bonawitz et al., Practical Secure Aggregation, 2017 (with its consistency check), on a sparse graph: Bell et
al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import shares
from fedfrozen_app.secure.roster import (
    Entry,
    Refused,
    Roster,
    Terms,
    bytes_by_name,
    checked_roster,
    read_roster,
    signed_text,
    survivors_text,
    texts_by_name,
    to_bytes,
    to_text,
)
from fedfrozen_app.secure.round_keys import SEED, Identity, Pair, Trust, derive, new_seed, seal, unseal
from fedfrozen_app.secure.vector import Vector

KEYS, SHARES, MASKED, CONFIRMED, DONE = "keys", "shares", "masked", "confirmed", "done"


@dataclass(frozen=True)
class Session:
    """What a client knows of a round between its steps. It holds secrets: it stays where it was made."""

    name: str
    terms: Terms
    state: str
    cipher: bytes  # seeds of the two key pairs
    mask: bytes
    own: bytes  # seed of its own mask
    roster_text: str = ""
    held: Mapping[str, bytes] = field(default_factory=dict)  # neighbour: its two shares, as they were opened
    survivors: tuple[str, ...] = ()

    @property
    def roster(self) -> Roster:
        return read_roster(self.roster_text, self.terms)  # checked when it was shown

    def text(self) -> str:
        """For a runtime that carries a client from process to process."""
        return canonical(
            {
                "name": self.name,
                "terms": self.terms.plain,
                "state": self.state,
                "seeds": [to_text(seed) for seed in (self.cipher, self.mask, self.own)],
                "roster": self.roster_text,
                "held": texts_by_name(self.held),
                "survivors": list(self.survivors),
            }
        )

    @classmethod
    def read(cls, text: str) -> "Session":
        found = json.loads(text)
        cipher, mask, own = (to_bytes(seed) for seed in found["seeds"])
        return cls(
            found["name"],
            Terms(**found["terms"]),
            found["state"],
            cipher,
            mask,
            own,
            found["roster"],
            bytes_by_name(found["held"]),
            tuple(found["survivors"]),
        )

    def _expect(self, state: str, step: str) -> None:
        if self.state != state:
            raise Refused(f"the step {step} was asked for when the round was at {self.state!r}")


def begin(name: str, terms: Terms, identity: Identity) -> tuple[Session, Entry]:
    """Step 1: new secrets, and what the others may know of them."""
    session = Session(name, terms, KEYS, new_seed(), new_seed(), new_seed())
    cipher, mask = Pair(session.cipher).public, Pair(session.mask).public
    signature = identity.sign(signed_text(terms, name, cipher, mask))
    return session, Entry(name, cipher, mask, identity.credential, signature)


def share(session: Session, roster_text: str, trust: Trust, fewest: int) -> tuple[Session, dict[str, bytes]]:
    """Step 2: an envelope for each neighbour. `fewest`: clients that the cohort must have."""
    session._expect(KEYS, "shares")
    roster = checked_roster(roster_text, session.terms, trust)
    own = roster.by_name.get(session.name)
    if own is None or (own.cipher, own.mask) != (Pair(session.cipher).public, Pair(session.mask).public):
        raise Refused("the roster does not hold its own keys of this round")
    if len(roster.entries) < fewest:
        raise Refused(f"the cohort has {len(roster.entries)} clients, and it asks for {fewest}")
    if roster.degree + 1 < min(fewest, len(roster.entries)):
        raise Refused(f"it would have {roster.degree} neighbours, too few for a cohort of {fewest}")
    holders, needed = roster.holders(session.name), roster.shares_needed
    halves = shares.split(session.own, holders, needed), shares.split(session.mask, holders, needed)
    envelopes, pair = {}, Pair(session.cipher)
    for holder in holders:
        if holder != session.name:
            both = halves[0][holder] + halves[1][holder]
            about = envelope_about(roster, session.name, holder)
            envelopes[holder] = seal(_channel(pair, roster, holder), both, about)
    kept = {session.name: halves[0][session.name] + halves[1][session.name]}
    return replace(session, state=SHARES, roster_text=roster_text, held=kept), envelopes


def envelope_about(roster: Roster, sender: str, receiver: str) -> bytes:
    return canonical([to_text(roster.digest), sender, receiver]).encode()


def _channel(pair: Pair, roster: Roster, other: str) -> bytes:
    try:
        return pair.agree(roster.by_name[other].cipher, roster.digest, "envelope")
    except ValueError as error:
        raise Refused(f"the key of {other} is none") from error


def open_envelopes(session: Session, envelopes: Mapping[str, bytes]) -> Session:
    """Step 3, first half: take the neighbours' shares in. Who sent none has dropped out already."""
    session._expect(SHARES, "mask")
    roster = session.roster
    strangers = set(envelopes) - set(roster.neighbours(session.name))
    if strangers:
        raise Refused(f"{min(strangers)} sent it shares, and is no neighbour of its")
    if len(envelopes) + 1 < roster.shares_needed:
        raise Refused(f"only {len(envelopes)} neighbours have sent shares: a sum could not be unmasked")
    held, pair = dict(session.held), Pair(session.cipher)
    for sender, sealed in envelopes.items():
        about = envelope_about(roster, sender, session.name)
        try:
            both = unseal(_channel(pair, roster, sender), sealed, about)
        except ValueError as error:
            raise Refused(f"the shares of {sender} cannot be opened: {error}") from error
        if len(both) != 2 * SEED:
            raise Refused(f"the shares of {sender} are none")
        held[sender] = both
    return replace(session, held=held)


def mask(session: Session, vector: Vector) -> Session:
    """Step 3, second half: mask this vector in place, the only one of the session."""
    session._expect(SHARES, "mask")
    roster = session.roster
    if len(session.held) < 2:
        raise Refused("it holds no shares of its neighbours")
    vector.mask(derive(session.own, roster.digest, "own mask"))
    pair = Pair(session.mask)
    for other in session.held:
        if other != session.name:
            vector.mask(pair_key(pair, roster, other), subtract=session.name > other)
    return replace(session, state=MASKED)


def pair_key(pair: Pair, roster: Roster, other: str) -> bytes:
    """Of the mask that two neighbours share: the one adds it, the other takes it off."""
    try:
        return pair.agree(roster.by_name[other].mask, roster.digest, "pair mask")
    except ValueError as error:
        raise Refused(f"the key of {other} is none") from error


def confirm(
    session: Session, survivors: Sequence[str], identity: Identity, fewest: int
) -> tuple[Session, bytes]:
    """Step 4, first half: sign whose vectors are in the sum, one list and no other."""
    session._expect(MASKED, "confirm")
    roster, found = session.roster, tuple(sorted(survivors))
    if len(set(found)) != len(found) or not set(found) <= set(roster.names):
        raise Refused("the survivors are not of this round's roster")
    if session.name not in found:
        raise Refused("the survivors leave it out, although it has sent its vector")
    if len(found) < max(roster.needed, fewest):
        raise Refused(f"{len(found)} clients are in the sum, and {max(roster.needed, fewest)} are needed")
    if unknown := [n for n in found if n in roster.neighbours(session.name) and n not in session.held]:
        raise Refused(f"{unknown[0]} is said to be in the sum, and has sent no shares")
    signature = identity.sign(survivors_text(roster, found))
    return replace(session, state=CONFIRMED, survivors=found), signature


def unmask(
    session: Session, confirmations: Mapping[str, bytes], trust: Trust
) -> tuple[Session, dict[str, bytes], dict[str, bytes]]:
    """Step 4, second half: (shares of survivors' own masks, shares of drop-outs' keys), and no more ever."""
    session._expect(CONFIRMED, "unmask")
    given = tuple(sorted(confirmations.items()))
    if problem := _unconfirmed(session.roster_text, session.terms, session.survivors, given, trust):
        raise Refused(problem)
    alive = set(session.survivors)
    own = {name: both[:SEED] for name, both in session.held.items() if name in alive}
    keys = {name: both[SEED:] for name, both in session.held.items() if name not in alive}
    return replace(session, state=DONE, held={}, cipher=b"", mask=b"", own=b""), own, keys


@lru_cache(maxsize=4)  # the clients of one process are shown the same
def _unconfirmed(
    roster_text: str,
    terms: Terms,
    survivors: tuple[str, ...],
    confirmations: tuple[tuple[str, bytes], ...],
    trust: Trust,
) -> str | None:
    """Why these signatures do not show that enough clients mean the same sum."""
    roster = read_roster(roster_text, terms)
    said, agreed = survivors_text(roster, survivors), 0
    for name, signature in confirmations:
        if agreed == roster.needed:  # enough: no other list can have as many
            break
        if name not in survivors:
            return f"{name} confirms a sum that it is not in"
        if trust.problem(name, roster.by_name[name].credential, said, signature):
            return f"{name} has signed another list of survivors, or nothing"
        agreed += 1
    if agreed < roster.needed:
        return f"{agreed} clients confirm the sum, and {roster.needed} are needed"
    return None
