"""Verifies signatures on keys by certificates: sites check each other, and the server checks each site before
it forwards their keys."""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.core.certificates import problem_of, read_trusted, who
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.secure.roster import PUBLIC_KEY
from fedfrozen_app.secure.round_keys import OnSight

SIGNATURE = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True, eq=False)
class OfThisFederation:
    """Accepts the signatures of sites that the federation's authority has certified."""

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
        if self.trusted and (problem := problem_of(certificate, list(self.trusted))):
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


@dataclass(frozen=True, eq=False)
class Shown:
    """The server's check. Without the federation's authorities it checks signatures against the keys that
    clients send: simulated clients have no certificates."""

    trusted: tuple[x509.Certificate, ...] = ()

    @classmethod
    def read(cls, authorities: Path) -> "Shown":
        """A run that was not submitted to a federation has no such file."""
        return cls(tuple(read_trusted(authorities)) if authorities.exists() else ())

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        if not self.trusted and len(credential) == PUBLIC_KEY:
            return OnSight().problem(name, credential, text, signature)
        return OfThisFederation(self.trusted).problem(name, credential, text, signature)
