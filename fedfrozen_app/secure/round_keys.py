"""Keys of one round, and the identities that sign them. Every primitive comes from a library.

A client has two key pairs per round (X25519): one to encrypt shares for its neighbours, one to derive masks.
Each is made from a seed of 16 bytes, the secret size of the Shamir scheme.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED = 16  # bytes
NONCE, TAG = 12, 16  # bytes that sealing adds


def new_seed() -> bytes:
    return secrets.token_bytes(SEED)


def derive(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose. `salt` is the roster's digest: other rounds and rosters give other keys."""
    return HKDF(SHA256(), 32, salt, f"fedfrozen secure aggregation: {purpose}".encode()).derive(secret)


@dataclass(frozen=True)
class Pair:
    """A key pair from its seed."""

    seed: bytes

    @cached_property
    def private(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derive(self.seed, b"", "key pair"))

    @cached_property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    def agree(self, other: bytes, salt: bytes, purpose: str) -> bytes:
        """The secret shared with the owner of this public key; `ValueError` if `other` is no key."""
        return derive(self.private.exchange(X25519PublicKey.from_public_bytes(other)), salt, purpose)


ANY = Pair(bytes(SEED))


def is_usable(public: bytes) -> bool:
    """Whether others can agree on a secret with the owner of this public key: not if it is of low order."""
    try:
        ANY.agree(public, b"", "check")
    except ValueError:
        return False
    return True


def commitment(seed: bytes) -> bytes:
    """Commit to the seed of a client's own mask, which its shares must reconstruct."""
    return derive(seed, b"", "commitment to the own mask")


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt, and authenticate `about`, which is not sent."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """`ValueError` if key or `about` differ, or the ciphertext was changed."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except (InvalidTag, ValueError) as error:
        raise ValueError("it is not from that neighbour, or about another round or roster") from error


class Identity(Protocol):
    """Signs for a client; others check the signature with `credential`."""

    @property
    def credential(self) -> bytes: ...

    def sign(self, text: bytes) -> bytes: ...


class Trust(Protocol):
    """Checks whether a signature is from the party that it names."""

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        """Why it is not valid; None if it is."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Simulated:
    """Identity of a client without a certificate: its key is drawn for the round."""

    seed: bytes

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(derive(self.seed, b"", "simulated identity"))

    @cached_property
    def credential(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        return self._key.sign(text)


class OnSight:
    """Trust on first use, for simulated clients: any key that verifies its own signature."""

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        try:
            Ed25519PublicKey.from_public_bytes(credential).verify(signature, text)
        except (InvalidSignature, ValueError):
            return "its signature is another's"
        return None


def digest(parts: Iterable[bytes]) -> bytes:
    """The hash of several texts, each with its length, so that different lists differ."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
