"""`fedfrozen provision FEDERATION.yaml -o KITS`: certificates, keys and a start-up kit for every party.

    KITS/authority/   the federation's own certificate authority; keep it off-line
    KITS/server/      for the server: its certificate, the sites' public keys, scripts, units, proxy
    KITS/NAME/        for the site NAME: its key pair, policy, data description, scripts, units

Run again with the same folder it keeps what is there and adds what is missing, so a new site is one more line
in the file; `--renew PARTY` makes a new certificate or new keys for that party.
"""

import datetime
import ipaddress
import os
import re
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedfrozen_app.arguments import Arguments
from fedfrozen_app.bundles import source_digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.flower.app_folder import app_folder
from fedfrozen_app.sites import templates
from fedfrozen_app.sites.kit import port_number, read_yaml

RESERVED = ("server", "authority")
AUTHORITY_DAYS = 3650
FIRST_PORT = 9094  # Flower's own for a SuperNode; sites on one machine need one each
SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o755


@dataclass(frozen=True)
class Site:
    name: str
    port: int
    data: dict[str, Any] = field(default_factory=lambda: {"kind": "images", "path": "data"})


@dataclass(frozen=True)
class Party:
    """The server, as the sites reach it, and where its SuperLink listens behind the proxy."""

    address: str
    port: int
    internal_port: int = 8000
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    server: Party
    sites: tuple[Site, ...]
    valid_days: int = 397


def provision(arguments: list[str]) -> None:
    """The verb."""
    parser = Arguments("fedfrozen provision", description=__doc__)
    parser.add_argument("federation", type=Path, help="YAML file: server: {address, port}, sites: [names]")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the kits")
    parser.add_argument(
        "--renew", metavar="PARTY", help="'server' or a site: make its certificate or keys anew"
    )
    options = parser.parse_args(arguments)
    plan = read_federation(options.federation)
    if options.renew is not None and options.renew not in ("server", *(site.name for site in plan.sites)):
        raise UserError(
            f"There is no party '{options.renew}' in {options.federation}: renew one that is there."
        )
    made = write_kits(plan, options.output, renew=options.renew)
    print(f"{options.output} holds the kits; new or renewed: {', '.join(made) or 'nothing'}.")
    print(f"Keep {options.output / 'authority'} off-line, and hand each other folder to its party alone.")


# The file ----------------------------------------------------------------------------------------------


def read_federation(path: Path) -> Plan:
    found = read_yaml(path)
    server = found.get("server")
    names = found.get("sites")
    if not isinstance(server, dict) or not {"address", "port"} <= set(server):
        raise UserError(f"{path} must say where the server is: server: {{address: HOST, port: NUMBER}}.")
    if not isinstance(names, list) or not names:
        raise UserError(f"{path} must name the sites: sites: [north, south].")
    unknown = sorted({str(key) for key in found} - {"server", "sites", "valid_days"})
    unknown += sorted({str(key) for key in server} - {"address", "port", "internal_port", "names"})
    if unknown:
        raise UserError(f"{path} holds the unknown key {unknown[0]}: remove it.")
    more = server.get("names", [])
    if not isinstance(more, list) or not all(_is_host(name) for name in more):
        raise UserError("server.names must be a list of host names and addresses: [fed.example.org].")
    party = Party(
        address=str(server["address"]),
        port=port_number(server["port"], "server.port"),
        internal_port=port_number(server.get("internal_port", 8000), "server.internal_port"),
        names=tuple(more),
    )
    if not _is_host(party.address):
        raise UserError(f"server.address={party.address} is no host name and no address: write one.")
    if party.port == party.internal_port:
        raise UserError(
            f"server.port and server.internal_port are both {party.port}: the proxy and the SuperLink "
            "behind it need one each."
        )
    sites = tuple(_site(entry, number) for number, entry in enumerate(names))
    double = {site.name for site in sites if [other.name for other in sites].count(site.name) > 1}
    if double:
        raise UserError(f"The site {sorted(double)[0]} is named twice in {path}: give each its own name.")
    days = found.get("valid_days", 397)
    if not isinstance(days, int) or not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"valid_days={days} must be a number of days from 1 to {AUTHORITY_DAYS}.")
    return Plan(party, sites, days)


def _is_host(name: Any) -> bool:
    """A host name, or an address: only the latter may hold colons."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", name):
        return False
    return ":" not in name or isinstance(_general_name(name), x509.IPAddress)


def _site(entry: Any, number: int) -> Site:
    settings = entry if isinstance(entry, dict) else {"name": entry}
    name = settings.get("name")
    # Also a file name, a node's name in Flower and a word in scripts: nothing that one of them misreads.
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", name) or name in RESERVED:
        raise UserError(
            f"The site name {name!r} cannot be used: take small letters, digits, - and _, "
            f"and none of {', '.join(RESERVED)}."
        )
    if unknown := sorted(set(settings) - {"name", "port", "data"}):
        raise UserError(f"The site {name} has the unknown key {unknown[0]}: use name, port, data.")
    site = Site(name, port_number(settings.get("port", FIRST_PORT + number), f"the port of site {name}"))
    data = settings.get("data", site.data)
    if not isinstance(data, dict):
        raise UserError(f"The site {name} must say the kind and the path of the data: {{kind, path}}.")
    return replace(site, data=data)


# The kits ----------------------------------------------------------------------------------------------


def write_kits(plan: Plan, folder: Path, *, renew: str | None = None) -> list[str]:
    """Write what is missing; the names of the parties that got something new."""
    authority = _authority(folder / "authority")
    made = []
    server = folder / "server"
    if renew == "server" or not (server / "server.crt").exists():
        _issue_server(plan, authority, server)
        made.append("server")
    for site in plan.sites:
        kit = folder / site.name
        if renew == site.name:
            for name in ("node.key", "node.key.pub", "executor.secret"):
                (kit / name).unlink(missing_ok=True)
        if not (kit / "node.key").exists():
            _write_site(plan, site, authority.certificate, kit)
            made.append(site.name)
        _write(server / "sites" / f"{site.name}.pub", (kit / "node.key.pub").read_bytes(), PUBLIC)
    _write_server(plan, server)
    return made


@dataclass(frozen=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def _authority(folder: Path) -> Authority:
    """The federation's own certificate authority: made once, then read."""
    key_file, certificate_file = folder / "ca.key", folder / "ca.crt"
    if key_file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"The authority in {folder} cannot be read ({error}): bring it back.") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return Authority(key, certificate)
    if (folder.parent / "server" / "ca.crt").exists():  # a new one would vouch for what no site believes
        raise UserError(f"The federation's authority is not here: bring {folder} back from where it is kept.")
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfrozen federation")])
    usage = x509.KeyUsage(
        digital_signature=False,
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
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    _write(key_file, _pem(key), SECRET)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return Authority(key, certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(identifier, critical=False)
    )


def _issue_server(plan: Plan, authority: Authority, folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfrozen server")])
    names = dict.fromkeys([plan.server.address, *plan.server.names, "localhost", "127.0.0.1"])
    certificate = (
        _builder(subject, authority.certificate.subject, key, plan.valid_days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA384())
    )
    _write(folder / "server.key", _pem(key), SECRET)
    _write(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
    _write(folder / "ca.crt", authority.certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_server(plan: Plan, folder: Path) -> None:
    values = {
        "address": plan.server.address,
        "port": str(plan.server.port),
        "internal_port": str(plan.server.internal_port),
        "sites": ", ".join(site.name for site in plan.sites),
        "count": str(len(plan.sites)),
    }
    if not (folder / "superexec.secret").exists():
        _write(folder / "superexec.secret", secrets.token_bytes(32), SECRET)
    _fill(folder, templates.SERVER, values)


def _write_site(plan: Plan, site: Site, authority: x509.Certificate, folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _write(folder / "node.key", private, SECRET)
    _write(folder / "node.key.pub", public + f" {site.name}\n".encode(), PUBLIC)
    _write(folder / "executor.secret", secrets.token_bytes(32), SECRET)
    _write(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM), PUBLIC)
    values = {
        "name": site.name,
        "superlink": f"{plan.server.address}:{plan.server.port}",
        "port": str(site.port),
        "data": yaml.safe_dump(site.data, default_flow_style=True).strip(),
        "bundle": bundle_digest(folder),
    }
    # What the site has made its own is never written over.
    missing = {name: text for name, text in templates.SITE.items() if not _is_own(folder / name)}
    _fill(folder, missing, values)


def _is_own(path: Path) -> bool:
    return path.name in ("site.yaml", "policy.yaml") and path.exists()


def bundle_digest(work: Path) -> str:
    """The digest of the sources that `flwr run` bundles of this installation: what a policy can insist on."""
    try:
        return source_digest(app_folder(work / ".bundle"))
    finally:
        shutil.rmtree(work / ".bundle", ignore_errors=True)


def _fill(folder: Path, files: dict[str, str], values: dict[str, str]) -> None:
    for name, text in files.items():
        filled = templates.Filled(text).substitute(values)
        _write(folder / name, filled.encode(), SCRIPT if name.endswith(".sh") else PUBLIC)


def _write(path: Path, content: bytes, mode: int) -> None:
    """With its mode from the first byte on: a key is never readable by others, not even for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    part.chmod(mode)
    part.replace(path)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
