"""Writes the kits of a federation's parties, with certificates of its authority."""

import shutil
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.bundles import source_digest
from fedfrozen_app.core.certificates import PEM
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.admitted import admit
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.federation_plan import FederationPlan
from fedfrozen_app.sites.files import PUBLIC, SCRIPT, write
from fedfrozen_app.sites.kit_templates import Filled
from fedfrozen_app.sites.operator_templates import OPERATOR
from fedfrozen_app.sites.request import KEYS, certificate_file, make_key, make_secret
from fedfrozen_app.sites.server_templates import SERVER
from fedfrozen_app.sites.site_templates import POLICY_STRICT, POLICY_TO_TRY, SITE

METRICS_PORTS = {"server": 9470, "site": 9471}


def write_kits(
    plan: FederationPlan, folder: Path, *, renew: str | None = None, passphrase: Passphrase | None = None
) -> list[str]:
    """Write missing kits, with their keys; the names of the parties that got something new."""
    passphrase = passphrase or Passphrase()
    place = folder / "authority"
    if (place / "ca.key").exists() or (folder / "server" / "ca.crt").exists():
        # Never a second authority: no site would trust it.
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
    plan: FederationPlan,
    authority: Authority,
    name: str,
    public: ec.EllipticCurvePublicKey,
    folder: Path,
    *,
    trying: bool,
) -> None:
    """Everything of a kit except its key, and the signed list of its files."""
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
            continue  # the site's own settings are never overwritten
        write(folder / file, content, SCRIPT if file.endswith(".sh") else PUBLIC)
    manifest.sign(folder, list(contents), authority.current, name, role)


def _filled(plan: FederationPlan, name: str, role: str, folder: Path, trying: bool) -> dict[str, bytes]:
    """The templates of a party's kit, with its values."""
    values = {
        "name": name,
        "address": plan.server.address,
        "port": str(plan.server.port),
        "superlink": f"{plan.server.address}:{plan.server.port}",
        "internal_port": str(plan.server.internal_port),
        "metrics_port": str(METRICS_PORTS.get(role, 0)),
    }
    if role == "site":
        data = next(site.data for site in plan.sites if site.name == name)
        values["data"] = yaml.safe_dump(data, default_flow_style=True).strip()
        values["bundle"] = bundle_digest(folder)
        values |= POLICY_TO_TRY if trying else POLICY_STRICT
    files = {"server": SERVER, "site": SITE, "operator": OPERATOR}[role]
    return {file: Filled(text).substitute(values).encode() for file, text in files.items()}


def bundle_digest(work: Path) -> str:
    """The digest of the sources that `flwr run` bundles from this installation; policies can require it."""
    try:
        return source_digest(app_folder(work / ".bundle"))
    finally:
        shutil.rmtree(work / ".bundle", ignore_errors=True)
