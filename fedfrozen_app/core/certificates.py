"""Reading and checking the certificates of a federation: who holds one, and who signed it."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedfrozen_app.core.errors import UserError

ROLES = ("site", "server", "operator")
PEM = serialization.Encoding.PEM
MANIFEST_HASH = ec.ECDSA(hashes.SHA384())


def general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def subject_of(name: str, role: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, role), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )


def who(subject: x509.Name) -> tuple[str, str]:
    """(name, role) of a party's subject."""
    names = [str(found.value) for found in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    roles = [str(found.value) for found in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    if len(names) != 1 or len(roles) != 1 or roles[0] not in ROLES:
        raise UserError(f"{subject.rfc4514_string()!r} names no party of a federation.")
    return names[0], roles[0]


def fingerprint(public: ec.EllipticCurvePublicKey) -> str:
    """A key's fingerprint for two people to compare: SHA-256 of its DER encoding, as groups of hex digits."""
    standard = public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(standard)
    text = digest.finalize().hex()
    return "-".join(text[start : start + 8] for start in range(0, 64, 8))


def serial(certificate: x509.Certificate) -> str:
    """A serial number in nginx's format: upper-case hexadecimal, two digits per byte."""
    number = f"{certificate.serial_number:X}"
    return number if len(number) % 2 == 0 else f"0{number}"


def read_trusted(path: Path) -> list[x509.Certificate]:
    """The authorities of a `ca.crt`."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): ask for the kit again.") from error


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): ask for the certificate again.") from error


def problem_of(certificate: x509.Certificate, trusted: list[x509.Certificate]) -> str | None:
    """Why this certificate is not valid: another authority's, or outside its dates."""
    for authority in trusted:
        try:
            certificate.verify_directly_issued_by(authority)
            break
        except (ValueError, TypeError, InvalidSignature):
            continue
    else:
        return "it is not of this federation's authority"
    now = datetime.datetime.now(datetime.UTC)
    if now < certificate.not_valid_before_utc:
        return "its time has not come, or this machine's clock is wrong"
    if now > certificate.not_valid_after_utc:
        return f"it expired on {certificate.not_valid_after_utc.date()}"
    return None


def signed_by_one_of(text: bytes, signature: bytes, trusted: list[x509.Certificate]) -> bool:
    for authority in trusted:
        public = authority.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey):
            continue
        try:
            public.verify(signature, text, MANIFEST_HASH)
            return True
        except InvalidSignature:
            continue
    return False
