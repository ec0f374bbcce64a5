"""A client's side of a masked round: four steps, in this order, once each. Anything else is refused.

    keys      it draws its keys and a seed for a mask of its own, and signs its public keys
    shares    it checks the roster, draws its neighbours by chance, and sends each of them an encrypted share
              of its two secrets
    mask      it opens the shares of those that drew it, and masks its vector: its own mask, and one with each
              that it drew or that drew it
    unmask    it signs the list of clients in the sum (confirm); once enough others have signed the same list,
              it sends one share of each that drew it: of the other's own mask if that vector is in the sum,
              or of its key if it dropped out; never both

Bonawitz et al., Practical Secure Aggregation, 2017 (with its consistency check), on a sparse graph that the
clients draw: Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020, against a
malicious server. There, the clients that drew a client also hold its shares. Here only those that it drew
hold them: otherwise all colluders could draw one victim and hold most of its shares.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import shares
from fedfrozen_app.secure.roster import (
    Entry,
    ProtocolError,
    Roster,
    Terms,
    bytes_by_name,
    checked_roster,
    holders,
    read_roster,
    signed_text,
    survivors_text,
    texts_by_name,
    to_bytes,
    to_text,
)
from fedfrozen_app.secure.round_keys import Identity, Pair, Trust, commitment, derive, new_seed, seal, unseal
from fedfrozen_app.secure.shares import SHARE
from fedfrozen_app.secure.vector import Vector

log = logging.getLogger(__name__)
KEYS, SHARES, MASKED, CONFIRMED, DONE = "keys", "shares", "masked", "confirmed", "done"


@dataclass(frozen=True)
class Session:
    """A client's state between the steps of a round. It holds secrets and never leaves the client."""

    name: str
    terms: Terms
    state: str
    cipher: bytes  # seeds of the two key pairs
    mask: bytes
    own: bytes  # seed of its own mask
    roster_text: str = ""
    drawn: tuple[str, ...] = ()  # its neighbours, which hold shares of its secrets
    held: Mapping[str, bytes] = field(default_factory=dict)  # client that drew it: its two shares, decrypted
    partners: tuple[str, ...] = ()  # with which it shares masks
    survivors: tuple[str, ...] = ()

    @property
    def roster(self) -> Roster:
        return read_roster(self.roster_text, self.terms)  # checked when it arrived

    @property
    def public(self) -> tuple[bytes, bytes, bytes]:
        """Its two public keys, and the commitment to its own mask."""
        return Pair(self.cipher).public, Pair(self.mask).public, commitment(self.own)

    def text(self) -> str:
        """Serialize the session, for a runtime that moves a client between processes."""
        return canonical(
            {
                "name": self.name,
                "terms": self.terms.plain,
                "state": self.state,
                "seeds": [to_text(seed) for seed in (self.cipher, self.mask, self.own)],
                "roster": self.roster_text,
                "drawn": list(self.drawn),
                "held": texts_by_name(self.held),
                "partners": list(self.partners),
                "survivors": list(self.survivors),
            }
        )

    @classmethod
    def read(cls, text: str) -> "Session":
        found = json.loads(text)
        terms = dict(found["terms"])
        cipher, mask, own = (to_bytes(seed) for seed in found["seeds"])
        return cls(
            found["name"],
            Terms(request=terms.pop("order"), **terms),
            found["state"],
            cipher,
            mask,
            own,
            found["roster"],
            tuple(found["drawn"]),
            bytes_by_name(found["held"]),
            tuple(found["partners"]),
            tuple(found["survivors"]),
        )

    def _expect(self, state: str, step: str) -> None:
        if self.state != state:
            raise ProtocolError(f"the step {step} was asked for when the round was at {self.state!r}")


def begin(name: str, terms: Terms, identity: Identity) -> tuple[Session, Entry]:
    """Step 1: new secrets, and their public part."""
    session = Session(name, terms, KEYS, new_seed(), new_seed(), new_seed())
    signature = identity.sign(signed_text(terms, name, *session.public))
    return session, Entry(name, *session.public, identity.credential, signature)


def share(session: Session, roster_text: str, trust: Trust, fewest: int) -> tuple[Session, dict[str, bytes]]:
    """Step 2: an envelope for each neighbour. `fewest`: the smallest cohort that the client accepts."""
    session._expect(KEYS, "shares")
    roster = checked_roster(roster_text, session.terms, trust)
    own = roster.by_name.get(session.name)
    if own is None or (own.cipher, own.mask, own.own) != session.public:
        raise ProtocolError("the roster does not hold its own keys of this round")
    if len(roster.entries) < fewest:
        raise ProtocolError(f"the cohort has {len(roster.entries)} clients, and it asks for {fewest}")
    if roster.degree + 1 < min(fewest, len(roster.entries)):
        raise ProtocolError(f"it would have {roster.degree} neighbours, too few for a cohort of {fewest}")
    drawn = roster.draw(session.name)
    everyone, needed = holders(session.name, drawn), roster.shares_needed
    halves = shares.split(session.own, everyone, needed), shares.split(session.mask, everyone, needed)
    envelopes, pair = {}, Pair(session.cipher)
    for holder in drawn:
        both = halves[0][holder] + halves[1][holder]
        about = envelope_about(roster, session.name, holder)
        envelopes[holder] = seal(_channel(pair, roster, holder), both, about)
    kept = {session.name: halves[0][session.name] + halves[1][session.name]}
    return replace(session, state=SHARES, roster_text=roster_text, drawn=drawn, held=kept), envelopes


def envelope_about(roster: Roster, sender: str, receiver: str) -> bytes:
    return canonical([to_text(roster.digest), sender, receiver]).encode()


def _channel(pair: Pair, roster: Roster, other: str) -> bytes:
    try:
        return pair.agree(roster.by_name[other].cipher, roster.digest, "envelope")
    except ValueError as error:
        raise ProtocolError(f"the key of {other} is none") from error


def open_envelopes(session: Session, envelopes: Mapping[str, bytes], present: Sequence[str]) -> Session:
    """Step 3, first half: decrypt the shares of those that drew it. `present`: those of its neighbours that
    have sent shares, too; the others have dropped out.

    As many envelopes as there may be colluders can fail to decrypt. The client still masks with their
    senders, and holds no share of theirs. If more fail, it was shown another roster than the others.
    """
    session._expect(SHARES, "mask")
    roster = session.roster
    if strangers := set(envelopes) - set(roster.names) | set(envelopes) & {session.name}:
        raise ProtocolError(f"{min(strangers)} sent it shares, and is no other client of the round")
    if strangers := set(present) - set(session.drawn):
        raise ProtocolError(f"{min(strangers)} is said to be there, and is no neighbour of its")
    if len(set(present)) + 1 < roster.shares_needed:
        raise ProtocolError(
            f"only {len(set(present))} of its neighbours are there: a sum could not be unmasked"
        )
    held, unreadable = dict(session.held), 0
    for sender, sealed in envelopes.items():
        try:
            held[sender] = _opened(session, roster, sender, sealed)
        except ProtocolError as error:
            unreadable += 1
            if unreadable > roster.colluders:
                raise
            log.warning("Masks: %s. The round goes on.", quoted(str(error)))
    return replace(session, held=held, partners=tuple(sorted({*present, *envelopes})))


def _opened(session: Session, roster: Roster, sender: str, sealed: bytes) -> bytes:
    """The two shares in an envelope."""
    about = envelope_about(roster, sender, session.name)
    try:
        both = unseal(_channel(Pair(session.cipher), roster, sender), sealed, about)
    except ValueError as error:
        raise ProtocolError(f"the shares of {sender} cannot be opened: {error}") from error
    if len(both) != 2 * SHARE:
        raise ProtocolError(f"the shares of {sender} are none")
    return both


def mask(session: Session, vector: Vector) -> Session:
    """Step 3, second half: mask this vector in place; a session masks one vector."""
    session._expect(SHARES, "mask")
    roster = session.roster
    if not session.partners:
        raise ProtocolError("it shares a mask with nobody")
    vector.mask(derive(session.own, roster.digest, "own mask"))
    pair = Pair(session.mask)
    for other in session.partners:
        vector.mask(pair_key(pair, roster, other), subtract=session.name > other)
    return replace(session, state=MASKED)


def pair_key(pair: Pair, roster: Roster, other: str) -> bytes:
    """The key of the mask that two neighbours share: one adds the mask, the other subtracts it."""
    try:
        return pair.agree(roster.by_name[other].mask, roster.digest, "pair mask")
    except ValueError as error:
        raise ProtocolError(f"the key of {other} is none") from error


def confirm(
    session: Session, survivors: Sequence[str], identity: Identity, fewest: int
) -> tuple[Session, bytes]:
    """Step 4, first half: sign the list of clients in the sum; one list per session."""
    session._expect(MASKED, "confirm")
    roster, found = session.roster, tuple(sorted(survivors))
    if len(set(found)) != len(found) or not set(found) <= set(roster.names):
        raise ProtocolError("the survivors are not of this round's roster")
    if session.name not in found:
        raise ProtocolError("the survivors leave it out, although it has sent its vector")
    if len(found) < max(roster.needed, fewest):
        raise ProtocolError(
            f"{len(found)} clients are in the sum, and {max(roster.needed, fewest)} are needed"
        )
    # Its own neighbours protect it: it must share a mask with each one that is in the sum.
    if unknown := [name for name in found if name in session.drawn and name not in session.partners]:
        raise ProtocolError(f"{unknown[0]} is said to be in the sum, and was said to be gone")
    signature = identity.sign(survivors_text(roster, found))
    return replace(session, state=CONFIRMED, survivors=found), signature


def unmask(
    session: Session, confirmations: Mapping[str, bytes], trust: Trust
) -> tuple[Session, dict[str, bytes], dict[str, bytes]]:
    """Step 4, second half: (shares of survivors' own masks, shares of drop-outs' keys). Then it ends."""
    session._expect(CONFIRMED, "unmask")
    given = tuple(sorted(confirmations.items()))
    if problem := _unconfirmed(session.roster_text, session.terms, session.survivors, given, trust):
        raise ProtocolError(problem)
    alive = set(session.survivors)
    own = {name: both[:SHARE] for name, both in session.held.items() if name in alive}
    keys = {name: both[SHARE:] for name, both in session.held.items() if name not in alive}
    return replace(session, state=DONE, held={}, cipher=b"", mask=b"", own=b""), own, keys


@lru_cache(maxsize=4)  # the clients of one process check the same texts
def _unconfirmed(
    roster_text: str,
    terms: Terms,
    survivors: tuple[str, ...],
    confirmations: tuple[tuple[str, bytes], ...],
    trust: Trust,
) -> str | None:
    """Why these signatures do not prove that enough clients agree on the survivors; None if they do."""
    roster = read_roster(roster_text, terms)
    text, agreed = survivors_text(roster, survivors), 0
    for name, signature in confirmations:
        if agreed == roster.needed:  # enough: no other list can have as many
            break
        if name not in survivors:
            return f"{name} confirms a sum that it is not in"
        if trust.problem(name, roster.by_name[name].credential, text, signature):
            return f"{name} has signed another list of survivors, or nothing"
        agreed += 1
    if agreed < roster.needed:
        return f"{agreed} clients confirm the sum, and {roster.needed} are needed"
    return None
