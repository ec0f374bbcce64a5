"""Certificates and a start-up kit for every party of a federation.

    fedfrozen provision init FEDERATION.yaml -o KITS    the authority, under a passphrase; keep it off-line
    fedfrozen provision sign REQUEST.csr FEDERATION.yaml -o KITS
                                                        the kit for whoever made the request; it holds no key
    fedfrozen provision rotate -o KITS [--finish]       another authority, with a time in which both count

    fedfrozen provision FEDERATION.yaml -o KITS         to try it on one machine: all kits at once, with keys

The last one holds every party's key, so it is no way to begin with real sites. Run again it keeps what is
there and adds what is missing; `--renew PARTY` (or `all`) makes new keys and certificates.
"""

import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.bundles import source_digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.flower.app_folder import app_folder
from fedfrozen_app.sites import manifest, templates
from fedfrozen_app.sites.admitted import admit
from fedfrozen_app.sites.authority import DAYS, PEM, Authority, Passphrase, fingerprint, general_name, who
from fedfrozen_app.sites.files import PUBLIC, SCRIPT, write
from fedfrozen_app.sites.kit import port_number, read_yaml
from fedfrozen_app.sites.request import KEYS, NAME, certificate_file, make_key, make_secret
from fedfrozen_app.verb_table import parse

RESERVED = ("server", "authority", "all")


@dataclass(frozen=True)
class Site:
    name: str
    data: dict[str, Any] = field(default_factory=lambda: {"kind": "images", "path": "data"})


@dataclass(frozen=True)
class Party:
    """The server, as the sites reach it, and the port on which its own processes meet behind the proxy."""

    address: str
    port: int
    internal_port: int = 8000
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    server: Party
    sites: tuple[Site, ...]
    operators: tuple[str, ...] = ("operator",)
    valid_days: int = 397

    def role(self, name: str) -> str | None:
        if name == "server":
            return "server"
        if name in self.operators:
            return "operator"
        return "site" if any(site.name == name for site in self.sites) else None

    def parties(self) -> list[str]:
        return ["server", *(site.name for site in self.sites), *self.operators]


# Verbs -------------------------------------------------------------------------------------------------


def provision(arguments: list[str]) -> None:
    """The verb."""
    words = {"init": init, "sign": sign, "rotate": rotate}
    if arguments and arguments[0] in words:
        words[arguments[0]](arguments[1:])
    else:
        everything(arguments)


def everything(arguments: list[str]) -> None:
    """All kits at once, to try a federation on one machine."""
    options = parse("provision", arguments)
    plan = read_federation(options.federation)
    if options.renew not in (None, "all", *plan.parties()):
        raise UserError(
            f"There is no party '{options.renew}' in {options.federation}: renew one that is there."
        )
    passphrase = Passphrase(options.passphrase_file)
    made = write_kits(plan, options.output, renew=options.renew, passphrase=passphrase)
    print(f"{options.output} holds the kits; new or renewed: {', '.join(made) or 'nothing'}.")
    print(
        "This is for trying things on one machine: whoever ran it has the key of every site. With real sites "
        "each makes its own: fedfrozen provision init, then site request and provision sign."
    )


def init(arguments: list[str]) -> None:
    """The authority alone."""
    options = parse("provision init", arguments)
    read_federation(options.federation)
    folder = options.output / "authority"
    if (folder / "ca.key").exists():
        raise UserError(f"{folder} holds an authority: `provision rotate` makes another with an overlap.")
    made = Authority.make(folder, Passphrase(options.passphrase_file).ask(new=True))
    print(f"{folder} holds the federation's authority: keep it off-line. Its fingerprint, for every party:")
    print(f"  {fingerprint(made.current.key.public_key())}")


def sign(arguments: list[str]) -> None:
    """A party's request becomes its certificate and its kit."""
    options = parse("provision sign", arguments)
    plan = read_federation(options.federation)
    name, role, public = read_request(options.request, plan)
    _compare(name, fingerprint(public), options.fingerprint)
    authority = Authority.read(options.output / "authority", Passphrase(options.passphrase_file))
    folder = options.output / name
    write_kit(plan, authority, name, public, folder, trying=False)
    print(f"{folder} is the kit of the {role} {name}. It holds no secret: send it back by any way.")
    if role != "server":
        print(
            f"Send {folder / certificate_file(role)} to the server, which admits it: fedfrozen server admit."
        )
    print("The party checks it with the authority's fingerprint, which it needs the first time:")
    print(f"  {fingerprint(authority.current.key.public_key())}")


def rotate(arguments: list[str]) -> None:
    """Another authority: begin, and finish once every party is renewed."""
    options = parse("provision rotate", arguments)
    passphrase = Passphrase(options.passphrase_file)
    authority = Authority.read(options.output / "authority", passphrase)
    if not options.finish:
        protected = b"ENCRYPTED" in (authority.folder / "ca.key").read_bytes()
        made = authority.rotate(passphrase.ask(new=True) if protected else passphrase.given())
        assert made.following is not None
        print("From now on kits trust both authorities. The next one's fingerprint:")
        print(f"  {fingerprint(made.following.key.public_key())}")
        print(
            "Renew the server first, then every site and operator (fedfrozen site renew, provision sign), "
            "then: provision rotate --finish, and the server once more."
        )
        return
    if authority.following is None:
        raise UserError("No rotation is under way: `fedfrozen provision rotate` begins one.")
    if (late := authority.unrenewed()) and not options.anyway:
        raise UserError(f"{', '.join(late)} would be shut out: renew them first, or finish with --anyway.")
    authority.finish()
    print(
        "The old authority counts no more. Renew the server now (site renew, provision sign, site install)."
    )


def _compare(name: str, found: str, told: str | None) -> None:
    """Whether a request is really from the party it names, asked of a person."""
    if told is not None:
        if re.sub(r"[^0-9a-f]", "", told.lower()) != found.replace("-", ""):
            raise UserError(f"The request's key is {found}, and not what {name} told: do not sign it.")
        return
    if not sys.stdin.isatty():
        raise UserError(f"Ask {name} for its key's fingerprint, and if it is {found}: --fingerprint {found}.")
    print(f"The request says it is from {name}. Its key is\n  {found}")
    if input(f"Is that what {name} told you, by another way? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("Nothing was signed.")


def read_request(path: Path, plan: Plan) -> tuple[str, str, ec.EllipticCurvePublicKey]:
    """(name, role, key) of a signing request that fits the federation."""
    try:
        found = x509.load_pem_x509_csr(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no signing request ({error}): have it sent again.") from error
    public = found.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp384r1":
        raise UserError(f"{path} is for another kind of key than Flower takes (EC, P-384).")
    if not found.is_signature_valid:
        raise UserError(f"{path} is not signed with its own key: whoever sent it does not hold that key.")
    name, role = who(found.subject)
    if plan.role(name) != role:
        raise UserError(f"The federation has no {role} {name}: add it to the file, or refuse the request.")
    return name, role, public


# The file ----------------------------------------------------------------------------------------------


def read_federation(path: Path) -> Plan:
    found = read_yaml(path)
    server = found.get("server")
    names = found.get("sites")
    if not isinstance(server, dict) or not {"address", "port"} <= set(server):
        raise UserError(f"{path} must say where the server is: server: {{address: HOST, port: NUMBER}}.")
    if not isinstance(names, list) or not names:
        raise UserError(f"{path} must name the sites: sites: [north, south].")
    unknown = sorted({str(key) for key in found} - {"server", "sites", "operators", "valid_days"})
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
    sites = tuple(_site(entry) for entry in names)
    double = {site.name for site in sites if [other.name for other in sites].count(site.name) > 1}
    if double:
        raise UserError(f"The site {sorted(double)[0]} is named twice in {path}: give each its own name.")
    operators = found.get("operators", ["operator"])
    if not isinstance(operators, list) or not all(
        isinstance(n, str) and NAME.fullmatch(n) for n in operators
    ):
        raise UserError(f"{path}: operators must be a list of names: [ana, ben].")
    if taken := {site.name for site in sites} & set(operators) | set(RESERVED) & set(operators):
        raise UserError(f"The operator {sorted(taken)[0]} has the name of another party: take another.")
    days = found.get("valid_days", 397)
    if not isinstance(days, int) or not 1 <= days <= DAYS:
        raise UserError(f"valid_days={days} must be a number of days from 1 to {DAYS}.")
    return Plan(party, sites, tuple(operators), days)


def _is_host(name: Any) -> bool:
    """A host name, or an address: only the latter may hold colons."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", name):
        return False
    return ":" not in name or isinstance(general_name(name), x509.IPAddress)


def _site(entry: Any) -> Site:
    settings = entry if isinstance(entry, dict) else {"name": entry}
    name = settings.get("name")
    # Also a file name, a node's name in Flower and a word in scripts: nothing that one of them misreads.
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        raise UserError(
            f"The site name {name!r} cannot be used: take small letters, digits, - and _, "
            f"and none of {', '.join(RESERVED)}."
        )
    if unknown := sorted(set(settings) - {"name", "data"}):
        raise UserError(f"The site {name} has the unknown key {unknown[0]}: use name, data.")
    site = Site(name)
    data = settings.get("data", site.data)
    if not isinstance(data, dict):
        raise UserError(f"The site {name} must say the kind and the path of the data: {{kind, path}}.")
    return replace(site, data=data)


# The kits ----------------------------------------------------------------------------------------------


def write_kits(
    plan: Plan, folder: Path, *, renew: str | None = None, passphrase: Passphrase | None = None
) -> list[str]:
    """Every party's kit with its key, where one is missing; the names of those that got something new."""
    passphrase = passphrase or Passphrase()
    place = folder / "authority"
    if (place / "ca.key").exists() or (folder / "server" / "ca.crt").exists():
        # Not a new one where there was one: it would vouch for what no site believes.
        authority = Authority.read(place, passphrase)
    else:
        authority = Authority.make(place, passphrase.given())
    made = []
    for name in plan.parties():
        kit, role = folder / name, plan.role(name)
        assert role is not None
        if renew in (name, "all") or not (kit / certificate_file(role)).exists():
            if renew in (name, "all"):
                (kit / KEYS[role]).unlink(missing_ok=True)
            public = make_key(kit / KEYS[role]).public_key()
            write_kit(plan, authority, name, public, kit, trying=True)
            made.append(name)
        if role == "server":
            make_secret(kit)
        else:
            admit(folder / "server", (kit / certificate_file(role)).read_bytes())
    return made


def write_kit(
    plan: Plan,
    authority: Authority,
    name: str,
    public: ec.EllipticCurvePublicKey,
    folder: Path,
    *,
    trying: bool,
) -> None:
    """All of a kit but its key, and the signed list of its files."""
    role = plan.role(name)
    assert role is not None
    server = plan.server
    hosts = (server.address, *server.names, "localhost", "127.0.0.1") if role == "server" else ()
    certificate = authority.issue(public, name, role, plan.valid_days, tuple(dict.fromkeys(hosts)))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    contents = {
        "ca.crt": authority.trusted(),
        certificate_file(role): certificate.public_bytes(PEM),
        **_filled(plan, name, role, folder, trying),
    }
    for file, content in contents.items():
        if file in manifest.YOURS and (folder / file).exists():
            continue  # what the site has made its own is never written over
        write(folder / file, content, SCRIPT if file.endswith(".sh") else PUBLIC)
    manifest.sign(folder, list(contents), authority.current, name, role)


def _filled(plan: Plan, name: str, role: str, folder: Path, trying: bool) -> dict[str, bytes]:
    """The templates of a party's kit, with its values."""
    values = {
        "name": name,
        "address": plan.server.address,
        "port": str(plan.server.port),
        "superlink": f"{plan.server.address}:{plan.server.port}",
        "internal_port": str(plan.server.internal_port),
    }
    if role == "site":
        data = next(site.data for site in plan.sites if site.name == name)
        values["data"] = yaml.safe_dump(data, default_flow_style=True).strip()
        values["bundle"] = bundle_digest(folder)
        values |= templates.POLICY_TO_TRY if trying else templates.POLICY_STRICT
    files = {"server": templates.SERVER, "site": templates.SITE, "operator": templates.OPERATOR}[role]
    return {file: templates.Filled(text).substitute(values).encode() for file, text in files.items()}


def bundle_digest(work: Path) -> str:
    """The digest of the sources that `flwr run` bundles of this installation: what a policy can insist on."""
    try:
        return source_digest(app_folder(work / ".bundle"))
    finally:
        shutil.rmtree(work / ".bundle", ignore_errors=True)
