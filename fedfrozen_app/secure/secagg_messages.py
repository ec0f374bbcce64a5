"""The messages of a masked round: the server's questions and the clients' answers.

Every text is JSON, read strictly on both sides. The third step is the train request itself, which carries
the envelopes for its client.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure import client
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import (
    Entry,
    ProtocolError,
    Roster,
    Terms,
    bytes_by_name,
    problem_of_entry,
    read_strict,
    survivors_text,
    texts_by_name,
    to_bytes,
    to_text,
)
from fedfrozen_app.secure.round_keys import NONCE, TAG, Identity, Trust
from fedfrozen_app.secure.shares import SHARE

SESSION, DIGEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
ASKED = {
    "keys": {"step", "terms"},
    "shares": {"step", "session", "roster"},
    "confirm": {"step", "session", "survivors"},
    "unmask": {"step", "session", "confirmations"},
}

# Questions of the server ------------------------------------------------------------------------------


def ask_keys(terms: Terms) -> str:
    return canonical({"step": "keys", "terms": terms.plain})


def ask_shares(roster: Roster) -> str:
    entries = [entry.plain for entry in roster.entries]
    return canonical({"step": "shares", "session": roster.terms.session, "roster": entries})


def ask_confirmation(session: str, survivors: Sequence[str]) -> str:
    return canonical({"step": "confirm", "session": session, "survivors": sorted(survivors)})


def ask_unmasking(session: str, confirmations: Mapping[str, bytes]) -> str:
    return canonical({"step": "unmask", "session": session, "confirmations": texts_by_name(confirmations)})


def envelopes_text(session: str, envelopes: Mapping[str, bytes], present: Sequence[str]) -> str:
    return canonical({"session": session, "envelopes": texts_by_name(envelopes), "present": list(present)})


# Answers of a client ----------------------------------------------------------------------------------


def read_question(text: str) -> dict[str, Any]:
    """Parse a question of the server; `ProtocolError` if it is malformed."""
    found = read_strict(text)
    if not isinstance(found, dict) or found.get("step") not in ASKED or set(found) != ASKED[found["step"]]:
        raise ProtocolError("it is no step of a masked round")
    return found


def read_terms(found: Any) -> Terms:
    if not isinstance(found, dict) or set(found) != {"session", "order", "round", "threshold", "neighbours"}:
        raise ProtocolError("its terms are none, or of another version's masks")
    session, request, number = found["session"], found["order"], found["round"]
    threshold, neighbours = found["threshold"], found["neighbours"]
    if not isinstance(session, str) or not SESSION.fullmatch(session):
        raise ProtocolError("its terms name no session")
    if not isinstance(request, str) or not DIGEST.fullmatch(request):
        raise ProtocolError("its terms name no request")
    if type(number) is not int or number < 1:
        raise ProtocolError("its terms name no round")
    if type(threshold) not in (int, float) or not 0.5 <= threshold <= 1:
        raise ProtocolError("its threshold is none")
    if neighbours is not None and (type(neighbours) is not int or neighbours < 2):
        raise ProtocolError("its number of neighbours is none")
    return Terms(session, request, number, float(threshold), neighbours)


def answer_step(
    question: Mapping[str, Any],
    name: str,
    session: Session | None,
    identity: Identity,
    trust: Trust,
    fewest: int,
) -> tuple[Session, str]:
    """Returns the session after this step, and the answer. `ProtocolError` if it breaks the protocol."""
    step = question["step"]
    if step == "keys":
        started, entry = client.begin(name, read_terms(question["terms"]), identity)
        return started, canonical({"entry": entry.plain})
    if session is None or question["session"] != session.terms.session:
        raise ProtocolError("it is of a round that it has not begun, or has ended")
    if step == "shares":
        roster = canonical(question["roster"])
        session, envelopes = client.share(session, roster, trust, fewest)
        return session, canonical({"envelopes": texts_by_name(envelopes)})
    if step == "confirm":
        survivors = names_of(question["survivors"], "the survivors")
        session, signature = client.confirm(session, survivors, identity, fewest)
        return session, canonical({"signature": to_text(signature)})
    session, own, keys = client.unmask(session, bytes_by_name(question["confirmations"]), trust)
    return session, canonical({"own": texts_by_name(own), "keys": texts_by_name(keys)})


def names_of(found: Any, what: str) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ProtocolError(f"{what} are no list of names")
    return found


def opened(text: str, session: Session | None, request: TrainRequest) -> Session:
    """The session with the envelopes that came with this request. `ProtocolError` if its keys were signed for
    another request."""
    found = read_strict(text)
    if not isinstance(found, dict) or set(found) != {"session", "envelopes", "present"}:
        raise ProtocolError("the request brings no envelopes")
    if session is None or found["session"] != session.terms.session:
        raise ProtocolError("the request is of a round that it has not begun, or has ended")
    if (request.digest, request.round) != (session.terms.request, session.terms.round):
        raise ProtocolError("the request is not the one that the round's keys were signed for")
    present = names_of(found["present"], "those that are there")
    return client.open_envelopes(session, bytes_by_name(found["envelopes"]), present)


# Answers, as the server reads them --------------------------------------------------------------------


def read_entry(text: str, name: str, terms: Terms, trust: Trust) -> Entry:
    """Keys that the other clients will accept: they would refuse the whole roster for one bad entry."""
    entry = Entry.read(_part(text, "entry"))
    if entry.name != name:
        raise ProtocolError("sent keys in the name of another")
    if problem := problem_of_entry(entry, terms, trust):
        raise ProtocolError(f"sent keys that are not to be believed: {problem}")
    return entry


def read_envelopes(text: str) -> dict[str, bytes]:
    found = bytes_by_name(_part(text, "envelopes"))
    if any(len(sealed) != NONCE + 2 * SHARE + TAG for sealed in found.values()):
        raise ProtocolError("sent envelopes of another size")
    return found


def read_signature(text: str, name: str, roster: Roster, survivors: Sequence[str], trust: Trust) -> bytes:
    """A signature that the other clients will accept: they would give no shares for one bad signature."""
    signature = to_bytes(str(_part(text, "signature")))
    about = survivors_text(roster, survivors)
    if problem := trust.problem(name, roster.by_name[name].credential, about, signature):
        raise ProtocolError(f"did not sign the list of those in the sum: {problem}")
    return signature


def read_unmasking(text: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    own, keys = (bytes_by_name(_part(text, part)) for part in ("own", "keys"))
    if any(len(share) != SHARE for share in (*own.values(), *keys.values())):
        raise ProtocolError("sent shares of another size")
    return own, keys


def _part(text: str, key: str) -> Any:
    found = read_strict(text)
    if isinstance(found, dict) and isinstance(reason := found.get("declined"), str):
        raise ProtocolError(reason)
    if not isinstance(found, dict) or key not in found:
        raise ProtocolError("sent no readable answer")
    return found[key]
