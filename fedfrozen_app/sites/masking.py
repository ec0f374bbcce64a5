"""A site's part in masked rounds: its identity, the sites that it trusts, and its sessions.

Its keys of a round are signed with the key of its certificate, and it accepts only keys that a certified site
of the federation has signed: a server cannot invent neighbours. The secrets of a round are kept in memory
only: if the executor ends, they are lost and the site has dropped out of the round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.core.certificates import read_certificate
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.certified import SIGNATURE, OfThisFederation
from fedfrozen_app.secure.client import DONE, Session
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.sites.request import key_of


@dataclass(frozen=True, eq=False)
class Certified:
    """The identity of a certified site."""

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


@dataclass
class SiteMasks:
    """The masked rounds of this site: one session per proposal, the newest."""

    kit: Path
    name: str
    _sessions: dict[str, Session] = field(default_factory=dict)  # by proposal's hash

    @cached_property
    def _identity(self) -> Certified:
        return Certified.read(self.kit)

    @cached_property
    def _trust(self) -> OfThisFederation:
        return OfThisFederation.read(self.kit)

    def session(self, proposal: str) -> Session | None:
        return self._sessions.get(proposal)

    def answer_step(
        self, proposal: str, question: Mapping[str, Any], asked: SecureAggregationConfig
    ) -> tuple[Session, str]:
        """The session after this step, not yet kept, and the answer. `ProtocolError` if it is refused."""
        if question["step"] == "keys":
            terms = secagg_messages.read_terms(question["terms"])
            if (terms.threshold, terms.neighbours) != (asked.threshold, asked.neighbours):
                raise ProtocolError("its terms are not those of the proposal")
            before = self.session(proposal)
            if before is not None and before.terms.session == terms.session:
                raise ProtocolError("the session was begun before")
        return secagg_messages.answer_step(
            *(question, self.name, self.session(proposal), self._identity, self._trust),
            asked.min_cohort,
        )

    def keep(self, proposal: str, session: Session) -> None:
        if session.state == DONE:
            self._sessions.pop(proposal, None)
        else:
            self._sessions[proposal] = session

    def opened(self, proposal: str, envelopes: str, request: TrainRequest) -> Session:
        return secagg_messages.opened(envelopes, self.session(proposal), request)
