"""Detached signatures of a file by a private key in PEM: Ed25519, or ECDSA as the kits have it."""

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedfrozen_app.core.certificates import MANIFEST_HASH
from fedfrozen_app.core.errors import UserError

Private = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
SIGNATURE, PUBLIC_KEY = ".sig", ".pub"  # beside the file that is signed


def read_private(path: Path) -> Private:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(
            f"--key {path} cannot be read ({error.strerror}): give a private key in PEM."
        ) from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"--key {path} is no private key in PEM without a passphrase: make one with "
            "`openssl genpkey -algorithm ed25519 -out KEY`."
        ) from error
    if not isinstance(key, Private):
        raise UserError(f"--key {path} is neither an Ed25519 nor an elliptic-curve key: give one of these.")
    return key


def sign_file(path: Path, key: Private) -> None:
    """Write FILE.sig, and FILE.pub with the public key."""
    text = path.read_bytes()
    signature = (
        key.sign(text) if isinstance(key, ed25519.Ed25519PrivateKey) else key.sign(text, MANIFEST_HASH)
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path.with_name(path.name + SIGNATURE).write_bytes(signature)
    path.with_name(path.name + PUBLIC_KEY).write_bytes(public)


def is_signed(path: Path, public_pem: bytes) -> bool:
    """Whether FILE.sig is this key's signature of the file."""
    public = serialization.load_pem_public_key(public_pem)
    signature, text = path.with_name(path.name + SIGNATURE).read_bytes(), path.read_bytes()
    try:
        if isinstance(public, ed25519.Ed25519PublicKey):
            public.verify(signature, text)
        elif isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(signature, text, MANIFEST_HASH)
        else:
            return False
    except InvalidSignature:
        return False
    return True
