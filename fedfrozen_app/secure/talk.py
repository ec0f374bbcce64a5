"""The texts of a masked round: the server's questions, and what a client answers to them.

Every text is JSON, read strictly on both sides. The order itself, with the envelopes for a client, is the
third step, and travels as every order does.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import client
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import (
    Entry,
    Refused,
    Roster,
    Terms,
    bytes_by_name,
    read_strict,
    texts_by_name,
    to_bytes,
    to_text,
)
from fedfrozen_app.secure.round_keys import Identity, Trust

SESSION, DIGEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
ASKED = {
    "keys": {"step", "terms"},
    "shares": {"step", "session", "roster"},
    "confirm": {"step", "session", "survivors"},
    "unmask": {"step", "session", "confirmations"},
}

# What the server asks ---------------------------------------------------------------------------------


def ask_keys(terms: Terms) -> str:
    return canonical({"step": "keys", "terms": terms.plain})


def ask_shares(roster: Roster) -> str:
    entries = [entry.plain for entry in roster.entries]
    return canonical({"step": "shares", "session": roster.terms.session, "roster": entries})


def ask_confirmation(session: str, survivors: Sequence[str]) -> str:
    return canonical({"step": "confirm", "session": session, "survivors": sorted(survivors)})


def ask_unmasking(session: str, confirmations: Mapping[str, bytes]) -> str:
    return canonical({"step": "unmask", "session": session, "confirmations": texts_by_name(confirmations)})


def envelopes_text(session: str, envelopes: Mapping[str, bytes]) -> str:
    return canonical({"session": session, "envelopes": texts_by_name(envelopes)})


# What a client makes of it ----------------------------------------------------------------------------


def read_question(text: str) -> dict[str, Any]:
    """`Refused` where it is none."""
    found = read_strict(text)
    if not isinstance(found, dict) or found.get("step") not in ASKED or set(found) != ASKED[found["step"]]:
        raise Refused("it is no step of a masked round")
    return found


def read_terms(found: Any) -> Terms:
    if not isinstance(found, dict) or set(found) != {"session", "order", "threshold", "neighbours"}:
        raise Refused("its terms are none")
    session, order = found["session"], found["order"]
    threshold, neighbours = found["threshold"], found["neighbours"]
    if not isinstance(session, str) or not SESSION.fullmatch(session):
        raise Refused("its terms name no session")
    if not isinstance(order, str) or not DIGEST.fullmatch(order):
        raise Refused("its terms name no order")
    if type(threshold) not in (int, float) or not 0.5 <= threshold <= 1:
        raise Refused("its threshold is none")
    if neighbours is not None and (type(neighbours) is not int or neighbours < 2):
        raise Refused("its number of neighbours is none")
    return Terms(session, order, float(threshold), neighbours)


def answer(
    question: Mapping[str, Any],
    name: str,
    session: Session | None,
    identity: Identity,
    trust: Trust,
    fewest: int,
) -> tuple[Session, str]:
    """The session after this step, and the answer; `Refused` where it does not fit, and nothing changes."""
    step = question["step"]
    if step == "keys":
        begun, entry = client.begin(name, read_terms(question["terms"]), identity)
        return begun, canonical({"entry": entry.plain})
    if session is None or question["session"] != session.terms.session:
        raise Refused("it is of a round that it has not begun, or has ended")
    if step == "shares":
        roster = canonical(question["roster"])
        session, envelopes = client.share(session, roster, trust, fewest)
        return session, canonical({"envelopes": texts_by_name(envelopes)})
    if step == "confirm":
        survivors = question["survivors"]
        if not isinstance(survivors, list) or not all(isinstance(one, str) for one in survivors):
            raise Refused("the survivors are no list of names")
        session, signature = client.confirm(session, survivors, identity, fewest)
        return session, canonical({"signature": to_text(signature)})
    session, own, keys = client.unmask(session, bytes_by_name(question["confirmations"]), trust)
    return session, canonical({"own": texts_by_name(own), "keys": texts_by_name(keys)})


def opened(text: str, session: Session | None, order: str) -> Session:
    """The session with the envelopes that came with this order; `Refused` where it is not the one that its
    keys were signed for."""
    found = read_strict(text)
    if not isinstance(found, dict) or set(found) != {"session", "envelopes"}:
        raise Refused("the order brings no envelopes")
    if session is None or found["session"] != session.terms.session:
        raise Refused("the order is of a round that it has not begun, or has ended")
    if order != session.terms.order:
        raise Refused("the order is not the one that the round's keys were signed for")
    return client.open_envelopes(session, bytes_by_name(found["envelopes"]))


# What the server makes of the answer ------------------------------------------------------------------


def read_entry(text: str, name: str) -> Entry:
    entry = Entry.read(_part(text, "entry"))
    if entry.name != name:
        raise Refused("sent keys in the name of another")
    return entry


def read_envelopes(text: str) -> dict[str, bytes]:
    return bytes_by_name(_part(text, "envelopes"))


def read_signature(text: str) -> bytes:
    return to_bytes(str(_part(text, "signature")))


def read_unmasking(text: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    return bytes_by_name(_part(text, "own")), bytes_by_name(_part(text, "keys"))


def _part(text: str, key: str) -> Any:
    found = read_strict(text)
    if isinstance(found, dict) and isinstance(said := found.get("declined"), str):
        raise Refused(said)
    if not isinstance(found, dict) or key not in found:
        raise Refused("sent no readable answer")
    return found[key]
