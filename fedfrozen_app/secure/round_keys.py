"""Keys of one round, and who vouches for them. Every primitive is a library's; here they only get names.

A client has two key pairs a round (X25519): one to talk to its neighbours in secret, one from which its masks
come. Each is made from a seed of 16 bytes, because that is what Shamir's scheme shares in one piece.
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
NONCE = 12


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
        """What the two of them, and nobody else, can work out; `ValueError` where `other` is no key."""
        return derive(self.private.exchange(X25519PublicKey.from_public_bytes(other)), salt, purpose)


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypted, and bound to `about`, which does not travel."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """`ValueError` where it was made with another key or about something else, or changed on its way."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except (InvalidTag, ValueError) as error:
        raise ValueError("it is not from that neighbour, or about another round or roster") from error


class Identity(Protocol):
    """What a client signs with; `credential` lets others check it."""

    @property
    def credential(self) -> bytes: ...

    def sign(self, text: bytes) -> bytes: ...


class Trust(Protocol):
    """How a client finds out whether a signature is that of the party it names."""

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        """Why it is not to be believed; None when it is."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Simulated:
    """Identity and trust where nobody is certified: the key is drawn for the round and believed on sight."""

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
    """The trust that goes with it."""

    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None:
        try:
            Ed25519PublicKey.from_public_bytes(credential).verify(signature, text)
        except (InvalidSignature, ValueError):
            return "its signature is another's"
        return None


def digest(parts: Iterable[bytes]) -> bytes:
    """Of several texts: the length of each goes in with it, so that no two lists look alike."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
