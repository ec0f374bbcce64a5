"""Shamir's secret sharing (pycryptodome, over GF(2^128)): any `needed` shares recover the secret."""

from collections.abc import Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir

SHARE = 16  # bytes


def split(secret: bytes, holders: Sequence[str], needed: int) -> dict[str, bytes]:
    """A share of a secret of 16 bytes for each holder."""
    if needed == 1:  # the library does not support a threshold of 1
        return dict.fromkeys(holders, secret)
    shares = dict(Shamir.split(needed, len(holders), secret, ssss=False))
    return {holder: shares[number] for number, holder in enumerate(holders, 1)}


def combine(shares: Mapping[str, bytes], holders: Sequence[str], needed: int) -> bytes:
    """The secret; `ValueError` if there are too few shares. Extra shares are ignored."""
    numbers = {holder: number for number, holder in enumerate(holders, 1)}
    known = [(numbers[holder], share) for holder, share in shares.items() if holder in numbers]
    if len(known) < needed:
        raise ValueError(f"{len(known)} shares are there, and {needed} are needed")
    return known[0][1] if needed == 1 else Shamir.combine(sorted(known)[:needed], ssss=False)
