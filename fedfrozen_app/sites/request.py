"""How a party gets its kit: it makes its key itself, and the key never leaves.

    fedfrozen site request NAME      makes the key and a signing request, for the authority
    fedfrozen site install KIT       checks the kit that came back, and copies it next to the key
    fedfrozen site renew             a request for a new certificate, before the old one ends

The server and operators do the same, with `--as server` and `--as operator`.
"""

import re
import secrets
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.core.certificates import (
    PEM,
    fingerprint,
    problem_of,
    read_certificate,
    read_trusted,
    signed_by_one_of,
    subject_of,
)
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.files import PUBLIC, SCRIPT, SECRET, write
from fedfrozen_app.sites.kit import read_yaml

KEYS = {"site": "node.key", "server": "server.key", "operator": "operator.key"}
NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")  # also a file name, and a word in scripts and in the proxy's list
LOST = "bring it back from a backup, or move it away and make another with `fedfrozen site request`."
OUTDATED = ("executor.secret", "node.key.pub", "register.sh", "revoke.sh")  # of kits older than signed ones


def certificate_file(role: str) -> str:
    return KEYS[role].replace(".key", ".crt")


# Verbs ----------------------------------------------------------------------------------------------------


def request(arguments: list[str]) -> None:
    """`fedfrozen site request NAME`."""
    options = parse("site request", arguments)
    if not NAME.fullmatch(options.name):
        raise UserError(f"The name {options.name!r} cannot be used: take small letters, digits, - and _.")
    folder = options.output or Path(options.name)
    if (folder / KEYS[options.role]).exists():
        raise UserError(f"{folder} has a key: `fedfrozen site renew {folder}` asks for a new certificate.")
    made = make_request(folder, options.name, options.role)
    _print_fingerprint(made, make_key(folder / KEYS[options.role]))


def renew(arguments: list[str]) -> None:
    """`fedfrozen site renew [KIT]`."""
    options = parse("site renew", arguments)
    folder = options.kit.expanduser().resolve()
    role = role_of(folder)
    key = folder / KEYS[role]
    key_of(key)  # converts the key of an older kit
    if options.new_key:
        key = key.with_name(f"{key.name}.next")
        key.unlink(missing_ok=True)
    made = make_request(folder, name_of(folder, role), role, key)
    _print_fingerprint(made, make_key(key))


def install(arguments: list[str]) -> None:
    """`fedfrozen site install RECEIVED [KIT]`."""
    options = parse("site install", arguments)
    folder = options.kit.expanduser().resolve()
    found = install_kit(options.received.expanduser().resolve(), folder, options.authority)
    print(f"{folder} is the kit of the {found.role} {found.name}, signed and whole.")
    if found.role == "site":
        print("Set your data in site.yaml and what you allow in policy.yaml, then: fedfrozen site check .")


def _print_fingerprint(made: Path, key: ec.EllipticCurvePrivateKey) -> None:
    print(f"Send {made} to the authority. It holds no secret; the key stays in {made.parent}.")
    print("Tell the authority this fingerprint by another way, a telephone for instance:")
    print(f"  {fingerprint(key.public_key())}")


# Parts ----------------------------------------------------------------------------------------------------


def make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of this file; a new one if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        _write_key(path, ec.generate_private_key(ec.SECP384R1()))
    return key_of(path)


def key_of(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a kit; the OpenSSH format of older kits is converted to PKCS 8."""
    try:
        content = path.read_bytes()
        older = b"OPENSSH" in content
        load = serialization.load_ssh_private_key if older else serialization.load_pem_private_key
        key = load(content, None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): {LOST}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no elliptic-curve key: {LOST}")
    if older:
        _write_key(path, key)
    return key


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.PKCS8
    write(path, key.private_bytes(PEM, form, serialization.NoEncryption()), SECRET)


def make_request(folder: Path, name: str, role: str, key_file: Path | None = None) -> Path:
    """The signing request, which proves that its sender holds the key."""
    key = make_key(key_file or folder / KEYS[role])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject_of(name, role))
    path = folder / f"{name}.csr"
    write(path, builder.sign(key, hashes.SHA384()).public_bytes(PEM), PUBLIC)
    return path


def role_of(folder: Path) -> str:
    for role, key in KEYS.items():
        if (folder / key).exists():
            return role
    raise UserError(f"{folder} has no key: `fedfrozen site request NAME` makes one.")


def name_of(folder: Path, role: str) -> str:
    """From the kit's signed list, or from the site.yaml of an older kit."""
    if (folder / manifest.LIST).exists():
        return manifest.read(folder, folder / "ca.crt").name
    if role == "site" and (folder / "site.yaml").exists():
        return str(read_yaml(folder / "site.yaml").get("name"))
    return role


def install_kit(received: Path, folder: Path, authority: str | None = None) -> manifest.Manifest:
    """Check a received kit against the authority and against the key in this folder, then copy it."""
    if not received.is_dir():
        raise UserError(f"There is no folder {received}: give the one that the authority sent back.")
    trust = received / "ca.crt"
    if authority is not None:
        _check_fingerprint(received, authority)
    elif (folder / "ca.crt").exists():
        trust = folder / "ca.crt"  # the trusted authority signs the next one
    elif received != folder:
        _ask_for_fingerprint(received)
    found = manifest.read(received, trust)
    if wrong := manifest.changed(received, found.files | found.yours):
        raise UserError(f"{received / wrong[0]} is not as the authority signed it: have it sent again.")
    if strange := [name for name in found.files | found.yours if Path(name).name != name]:
        raise UserError(f"{received} lists {strange[0]!r}, which is no file's name: do not use it.")
    if found.role != (own := role_of(folder)):
        raise UserError(
            f"{received} is for the {found.role} {found.name}, and {folder} has the key of a {own}."
        )
    certificate = read_certificate(received / certificate_file(found.role))
    if problem := problem_of(certificate, read_trusted(received / "ca.crt")):
        raise UserError(f"The certificate in {received} cannot be used: {problem}.")
    _take_key(folder, found.role, certificate)
    for name in [*found.files, *found.yours, manifest.LIST, manifest.SIGNATURE]:
        if name in found.yours and (folder / name).exists():
            continue  # the site's own settings are never overwritten
        mode = SCRIPT if name.endswith(".sh") else PUBLIC
        write(folder / name, (received / name).read_bytes(), mode)
    for name in (*OUTDATED, f"{found.name}.csr"):
        (folder / name).unlink(missing_ok=True)
    if found.role == "server":
        make_secret(folder)
    return found


def make_secret(folder: Path) -> None:
    """The secret with which Flower's SuperExec authenticates to its SuperLink."""
    if not (folder / "superexec.secret").exists():
        write(folder / "superexec.secret", secrets.token_bytes(32), SECRET)


def _take_key(folder: Path, role: str, certificate: x509.Certificate) -> None:
    """The key that the certificate is for: this kit's, or the one that `renew --new-key` made."""
    path = folder / KEYS[role]
    following = path.with_name(f"{path.name}.next")
    public = certificate.public_key()
    if key_of(path).public_key() == public:
        return
    if not following.exists() or key_of(following).public_key() != public:
        raise UserError(f"The certificate is for another key than {path}: was another request signed?")
    following.replace(path)


def _check_fingerprint(received: Path, expected: str) -> None:
    """The authority that signed the list must have this fingerprint."""
    wanted = re.sub(r"[^0-9a-f]", "", expected.lower())
    for authority in read_trusted(received / "ca.crt"):
        public = authority.public_key()
        if isinstance(public, ec.EllipticCurvePublicKey) and fingerprint(public).replace("-", "") == wanted:
            text, signature = ((received / name).read_bytes() for name in (manifest.LIST, manifest.SIGNATURE))
            if signed_by_one_of(text, signature, [authority]):
                return
    raise UserError(f"{received} is of another authority than {expected}: do not use it.")


def _ask_for_fingerprint(received: Path) -> None:
    """Let a person compare the fingerprint of the authority that signed the list."""
    manifest.read(received, received / "ca.crt")
    text, signature = ((received / name).read_bytes() for name in (manifest.LIST, manifest.SIGNATURE))
    trusted = read_trusted(received / "ca.crt")
    public = next(found for found in trusted if signed_by_one_of(text, signature, [found])).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    shown = fingerprint(public)
    if not sys.stdin.isatty():
        raise UserError(
            f"{received} says its authority is {shown}: compare that with whoever keeps the authority, then "
            f"add --authority {shown}."
        )
    print(f"The authority that signed this kit is\n  {shown}")
    if input("Is that what its keeper told you? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("The kit was not installed.")
