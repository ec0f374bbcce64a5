"""A site's part in masked rounds: who it is to the other sites, whom it believes, and what it keeps secret.

Its keys of a round are signed with the key of its certificate, and it believes only keys that were signed so
by a site of the federation: a server cannot invent neighbours. The secrets of a round are in memory alone. If
the executor ends, they are gone, and the site has dropped out of the round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.errors import UserError
from fedfrozen_app.secure import talk
from fedfrozen_app.secure.client import DONE, Session
from fedfrozen_app.secure.roster import Refused
from fedfrozen_app.sites.authority import problem_of, read_certificate, read_trusted, who
from fedfrozen_app.sites.request import key_of

SIGNATURE = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True, eq=False)
class Certified:
    """A site as its certificate names it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def read(cls, kit: Path) -> "Certified":
        return cls(key_of(kit / "node.key"), read_certificate(kit / "node.crt"))

    @cached_property
    def credential(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def sign(self, text: bytes) -> bytes:
        return self.key.sign(text, SIGNATURE)


@dataclass(frozen=True, eq=False)
class OfThisFederation:
    """Believes the sites that the federation's authority has certified, each in its own name."""

    trusted: tuple[x509.Certificate, ...]

    @classmethod
    def read(cls, kit: Path) -> "OfThisFederation":
        return cls(tuple(read_trusted(kit / "ca.crt")))

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        try:
            certificate = x509.load_der_x509_certificate(credential)
            named, role = who(certificate.subject)
        except (ValueError, UserError):
            return "it shows no certificate"
        if problem := problem_of(certificate, list(self.trusted)):
            return problem
        if (named, role) != (name, "site"):
            return f"its certificate is that of the {role} {named}"
        public = certificate.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return "its certificate holds another kind of key"
        try:
            public.verify(signature, text, SIGNATURE)
        except InvalidSignature:
            return "its signature is another's"
        return None


@dataclass
class SiteMasks:
    """The rounds that this site is in: of each run one, its newest."""

    kit: Path
    name: str
    _sessions: dict[str, Session] = field(default_factory=dict)  # by run

    @cached_property
    def _identity(self) -> Certified:
        return Certified.read(self.kit)

    @cached_property
    def _trust(self) -> OfThisFederation:
        return OfThisFederation.read(self.kit)

    def session(self, run: str) -> Session | None:
        return self._sessions.get(run)

    def answer(
        self, run: str, question: Mapping[str, Any], asked: SecureAggregationConfig, fewest: int
    ) -> tuple[Session, str]:
        """The session after this step, not yet kept, and the answer; `Refused` otherwise."""
        if question["step"] == "keys":
            terms = talk.read_terms(question["terms"])
            if (terms.threshold, terms.neighbours) != (asked.threshold, asked.neighbours):
                raise Refused("its terms are not those of the proposal")
            before = self.session(run)
            if before is not None and before.terms.session == terms.session:
                raise Refused("the session was begun before")
        return talk.answer(question, self.name, self.session(run), self._identity, self._trust, fewest)

    def keep(self, run: str, session: Session) -> None:
        if session.state == DONE:
            self._sessions.pop(run, None)
        else:
            self._sessions[run] = session

    def opened(self, run: str, envelopes: str, order: str) -> Session:
        return talk.opened(envelopes, self.session(run), order)
