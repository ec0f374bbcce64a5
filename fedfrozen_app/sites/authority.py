"""The federation's own certificate authority: it certifies the server, the sites and the operators.

Its key is in `authority/`, under a passphrase, and is needed to sign only. During a rotation there are two:
parties that renew get certificates of the next one and trust both; the server keeps its old certificate until
every site knows the next authority; then the old one is retired.
"""

import datetime
import getpass
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedfrozen_app.core.certificates import MANIFEST_HASH, PEM, fingerprint, general_name, serial, subject_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.files import PUBLIC, SECRET, write

DAYS = 3650  # of the authority itself
VARIABLE = "FEDFROZEN_AUTHORITY_PASSPHRASE"
USAGE = {
    "server": [ExtendedKeyUsageOID.SERVER_AUTH],
    "site": [ExtendedKeyUsageOID.CLIENT_AUTH],
    "operator": [ExtendedKeyUsageOID.CLIENT_AUTH],
}


# The passphrase -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passphrase:
    """Where the authority's passphrase comes from: a file, the environment, or the person at the terminal."""

    file: Path | None = None

    def given(self) -> bytes | None:
        """From the file or the environment; None if neither has one."""
        if self.file is not None:
            try:
                found = self.file.read_bytes().rstrip(b"\r\n")
            except OSError as error:
                raise UserError(
                    f"{self.file} cannot be read ({error.strerror}): give a readable file."
                ) from error
        else:
            found = os.environ.get(VARIABLE, "").encode()
            if not found:
                return None
        return _long_enough(found)

    def ask(self, *, new: bool) -> bytes:
        found = self.given()
        if found is not None:
            return found
        if not sys.stdin.isatty():
            raise UserError(
                f"The authority's key needs a passphrase: --passphrase-file FILE, or set {VARIABLE}."
            )
        typed = getpass.getpass("Passphrase of the authority: ")
        if new and getpass.getpass("Once more: ") != typed:
            raise UserError("The two passphrases differ: try again.")
        return _long_enough(typed.encode())


def _long_enough(passphrase: bytes) -> bytes:
    if len(passphrase) < 8:
        raise UserError("The authority's passphrase has fewer than 8 characters: take a longer one.")
    return passphrase


# The authority --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signer:
    """One authority: its key and its own certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls) -> "Signer":
        key = ec.generate_private_key(ec.SECP384R1())
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedfrozen federation {today}")])
        usage = x509.KeyUsage(
            digital_signature=True,  # of the kits' lists of files
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            _builder(name, name, key.public_key(), DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA384())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, folder: Path, stem: str, passphrase: Passphrase) -> "Signer":
        try:
            pem = (folder / f"{stem}.key").read_bytes()
            certificate = x509.load_pem_x509_certificate((folder / f"{stem}.crt").read_bytes())
            secret = passphrase.ask(new=False) if b"ENCRYPTED" in pem else None
            key = serialization.load_pem_private_key(pem, secret)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and "password" in str(error).lower():
                raise UserError("The authority's passphrase is another: try again.") from error
            raise UserError(f"The authority in {folder} cannot be read ({error}): bring it back.") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, certificate)

    def write(self, folder: Path, stem: str, secret: bytes | None) -> None:
        how = serialization.BestAvailableEncryption(secret) if secret else serialization.NoEncryption()
        private = self.key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how)
        write(folder / f"{stem}.key", private, SECRET)
        write(folder / f"{stem}.crt", self.certificate.public_bytes(PEM), PUBLIC)

    def issue(
        self, public: ec.EllipticCurvePublicKey, name: str, role: str, days: int, hosts: tuple[str, ...] = ()
    ) -> x509.Certificate:
        """A certificate that this key belongs to NAME, which is a site, the server or an operator."""
        builder = (
            _builder(subject_of(name, role), self.certificate.subject, public, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(USAGE[role]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA384())

    def sign(self, text: bytes) -> bytes:
        return self.key.sign(text, MANIFEST_HASH)


@dataclass(frozen=True)
class Authority:
    """The current authority, and during a rotation the next one."""

    folder: Path
    current: Signer
    following: Signer | None = None

    @classmethod
    def make(cls, folder: Path, secret: bytes | None) -> "Authority":
        made = cls(folder, Signer.make())
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        made.current.write(folder, "ca", secret)
        return made

    @classmethod
    def read(cls, folder: Path, passphrase: Passphrase) -> "Authority":
        if not (folder / "ca.key").exists():
            raise UserError(
                f"The federation's authority is not here: bring {folder} back from where it is kept."
            )
        current = Signer.read(folder, "ca", passphrase)
        rotating = (folder / "next.key").exists()
        return cls(folder, current, Signer.read(folder, "next", passphrase) if rotating else None)

    def trusted(self) -> bytes:
        """`ca.crt` of every kit: all authorities that are trusted now."""
        signers = [self.current] + ([self.following] if self.following else [])
        return b"".join(signer.certificate.public_bytes(PEM) for signer in signers)

    def issue(
        self, public: ec.EllipticCurvePublicKey, name: str, role: str, days: int, hosts: tuple[str, ...] = ()
    ) -> x509.Certificate:
        """Signed by the next authority if there is one, except for the server: sites may not know it yet."""
        signer = self.following if self.following and role != "server" else self.current
        certificate = signer.issue(public, name, role, days, hosts)
        self._note(name, role, certificate, signer)
        return certificate

    def rotate(self, secret: bytes | None) -> "Authority":
        """Begin a rotation: from now on both are trusted."""
        if self.following is not None:
            raise UserError("A rotation is under way: renew every party, then `provision rotate --finish`.")
        following = Signer.make()
        following.write(self.folder, "next", secret)
        return Authority(self.folder, self.current, following)

    def unrenewed(self) -> list[str]:
        """The parties without a certificate of the next authority; the server gets its own last."""
        assert self.following is not None
        new = fingerprint(self.following.key.public_key())
        issued = self.issued()
        return sorted(n for n, entry in issued.items() if entry["role"] != "server" and entry["by"] != new)

    def finish(self) -> "Authority":
        """End a rotation: kits made from now on trust the next authority only."""
        assert self.following is not None
        retired = self.folder / f"retired-{self.current.certificate.not_valid_before_utc.date()}"
        retired.mkdir(exist_ok=True)
        for part in ("key", "crt"):
            (self.folder / f"ca.{part}").replace(retired / f"ca.{part}")
            (self.folder / f"next.{part}").replace(self.folder / f"ca.{part}")
        return Authority(self.folder, self.following)

    def issued(self) -> dict[str, dict[str, str]]:
        path = self.folder / "issued.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _note(self, name: str, role: str, certificate: x509.Certificate, signer: Signer) -> None:
        entry = {
            "role": role,
            "serial": serial(certificate),
            "until": certificate.not_valid_after_utc.isoformat(),
            "by": fingerprint(signer.key.public_key()),
        }
        text = json.dumps(self.issued() | {name: entry}, indent=2)
        write(self.folder / "issued.json", text.encode(), PUBLIC)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
