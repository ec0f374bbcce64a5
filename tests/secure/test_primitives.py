"""Each primitive against published values: nobody has wired it up the wrong way round."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedfrozen_app.secure import shares
from fedfrozen_app.secure.round_keys import OnSight, Pair, Simulated, derive, digest, seal, unseal
from fedfrozen_app.secure.vector import Vector


def hexed(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def test_x25519_of_rfc_7748():
    """Section 5.2, first vector."""
    scalar = hexed("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = hexed("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    shared = X25519PrivateKey.from_private_bytes(scalar).exchange(X25519PublicKey.from_public_bytes(point))
    assert shared == hexed("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")


def test_hkdf_of_rfc_5869():
    """Test case 1, and that `derive` is this function with our words."""
    okm = HKDF(SHA256(), 42, hexed("000102030405060708090a0b0c"), hexed("f0f1f2f3f4f5f6f7f8f9")).derive(
        b"\x0b" * 22
    )
    assert okm == hexed(
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    said = b"fedfrozen secure aggregation: x"
    assert derive(b"k" * 16, b"salt", "x") == HKDF(SHA256(), 32, b"salt", said).derive(b"k" * 16)


def test_chacha20_of_rfc_8439():
    """Keystream for the key 00..00, nonce 0, counter 0 (appendix A.1, vector 1), as a mask adds it."""
    stream = hexed(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    vector = Vector(np.zeros(2, "<u8"), np.zeros(12, "<u4"))
    vector.mask(bytes(32))
    assert vector.packed(32).tobytes() == stream
    vector.mask(bytes(32), subtract=True)
    assert not vector.head.any() and not vector.body.any()


def test_a_long_mask_is_one_stream():
    """Across the pieces in which it is worked out."""
    long, short = Vector.zeros(3, 200_001), Vector.zeros(3, 70_000)
    long.mask(b"k" * 32)
    short.mask(b"k" * 32)
    assert (long.body[:70_000] == short.body).all() and (long.head == short.head).all()
    assert len(set(long.body[:1000].tolist())) > 990


def test_aes_gcm_of_the_nist_suite():
    """Test case 14 of McGrew and Viega: 256 bits, one block of zeros."""
    sealed = AESGCM(bytes(32)).encrypt(bytes(12), bytes(16), None)
    assert sealed == hexed("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919")


def test_envelopes_open_with_their_key_and_about_their_roster_only():
    key = b"k" * 32
    sealed = seal(key, b"secret", b"roster a")
    assert unseal(key, sealed, b"roster a") == b"secret"
    assert b"secret" not in sealed and seal(key, b"secret", b"roster a") != sealed
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for attempt in (
        (key, sealed, b"roster b"),
        (b"l" * 32, sealed, b"roster a"),
        (key, changed, b"roster a"),
        (key, b"", b"roster a"),
    ):
        with pytest.raises(ValueError, match="not from that neighbour"):
            unseal(*attempt)


def test_ed25519_of_rfc_8032():
    key = Ed25519PrivateKey.from_private_bytes(
        hexed("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    assert key.public_key().public_bytes_raw() == hexed(
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    )
    assert key.sign(b"") == hexed(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b"
    )
    one, other = Simulated(b"1" * 16), Simulated(b"2" * 16)
    assert OnSight().problem("a", one.credential, b"text", one.sign(b"text")) is None
    assert OnSight().problem("a", one.credential, b"text", other.sign(b"text"))
    assert OnSight().problem("a", b"short", b"text", one.sign(b"text"))


def test_shamir_by_hand():
    """Two of three over GF(2^128): with the line s + a·x through share 1 (x = 1) and share 2 (x = the
    polynomial x), s = (2·share1 + share2) / 3, so for s = 0 share 2 is share 1 doubled, which without a
    carry is a shift."""
    from Crypto.Protocol.SecretSharing import Shamir

    first = 0x0123456789ABCDEF
    second = first << 1
    parts = [(1, first.to_bytes(16, "big")), (2, second.to_bytes(16, "big"))]
    assert Shamir.combine(parts) == bytes(16)
    # s = 5, a = first: shares s + a and s + 2a, where + is exclusive or.
    parts = [(1, (5 ^ first).to_bytes(16, "big")), (2, (5 ^ second).to_bytes(16, "big"))]
    assert Shamir.combine(parts) == (5).to_bytes(16, "big")


@pytest.mark.parametrize(("holders", "needed"), [("abc", 2), ("abcdefg", 5), ("ab", 1), ("ab", 2)])
def test_any_of_enough_shares_give_the_secret(holders, needed):
    secret = bytes(range(16))
    found = shares.split(secret, list(holders), needed)
    names = list(found)
    for start in range(len(names)):
        some = [names[(start + step) % len(names)] for step in range(needed)]
        assert shares.combine({n: found[n] for n in some}, list(holders), needed) == secret
    assert shares.combine(found, list(holders), needed) == secret
    if needed > 1:
        few = {name: found[name] for name in names[: needed - 1]}
        with pytest.raises(ValueError, match=f"{needed - 1} shares are there"):
            shares.combine(few, list(holders), needed)
        assert all(share != secret for share in found.values())


def test_two_of_a_pair_work_out_the_same_and_other_rosters_another():
    one, other = Pair(b"1" * 16), Pair(b"2" * 16)
    assert one.agree(other.public, b"r", "x") == other.agree(one.public, b"r", "x")
    assert one.agree(other.public, b"r", "x") != one.agree(other.public, b"s", "x")
    assert one.agree(other.public, b"r", "x") != one.agree(other.public, b"r", "y")
    for bad in (bytes(32), b"short"):  # a point of small order would make a key that all know
        with pytest.raises(ValueError):
            one.agree(bad, b"r", "x")


def test_lists_of_texts_have_digests_of_their_own():
    assert digest([b"ab", b"c"]) != digest([b"a", b"bc"])
