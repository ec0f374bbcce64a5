"""`fedfrozen site check [KIT]`: whether this site can take part, one line per check."""

import datetime
import shutil
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from fedfrozen_app.config import compose_run
from fedfrozen_app.core import registry
from fedfrozen_app.core.certificates import problem_of, read_certificate, read_trusted
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    HEARTBEAT_DEFAULT_INTERVAL,
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    NodeAuthHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    public_key_to_bytes,
)
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.audit_log import AuditLog, read_audit
from fedfrozen_app.sites.fleet_client import server_context
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import running
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.process_check import check_executor, check_supernode, server_contact
from fedfrozen_app.sites.request import key_of
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.views import View

MIN_FREE_GB = 2.0
RENEW_DAYS = 14
EXPIRED = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
SECRETS = ("node.key", "link.pem")


def main(arguments: list[str]) -> None:
    """The verb: one line per check; exit code 2 if one of them fails."""
    kit = Kit.read(parse("site check", arguments).kit)
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok      {name}: {check(kit)}")
        except UserError as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
    if failed:
        raise UserError(f"{failed} of {len(CHECKS)} checks of the site {kit.name} failed: see above.")


def check_files(kit: Kit) -> str:
    for name in SECRETS:
        path = kit.folder / name
        if not path.exists() and name != "link.pem":  # which the site makes at its first start
            raise UserError(f"{path} is missing: ask for the kit again.")
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UserError(f"others can read {path}: chmod 600 {path}.")
    return f"the secrets of {kit.folder} are its owner's alone"


def check_kit(kit: Kit) -> str:
    """The files match the authority's signed list; site.yaml and policy.yaml are the site's own."""
    found = manifest.check(kit.folder)
    if found.role != "site" or found.name != kit.name:
        raise UserError(
            f"the kit was signed for the {found.role} {found.name}, and site.yaml says {kit.name}."
        )
    return f"{counted(len(found.files), 'file')} as signed; site.yaml and policy.yaml are yours to change"


def check_certificate(kit: Kit) -> str:
    """This site's own certificate, which the server's proxy requires."""
    certificate = read_certificate(kit.folder / "node.crt")
    if problem := problem_of(certificate, read_trusted(kit.folder / "ca.crt")):
        raise UserError(f"{problem}: `fedfrozen site renew`, and send the request to the authority.")
    days = (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if days < RENEW_DAYS:
        raise UserError(f"it ends in {counted(days, 'day')}: `fedfrozen site renew` now, before it does.")
    return f"good for {days} more days"


def check_policy(kit: Kit) -> str:
    policy = Policy.read(kit.policy)
    line = f"strategies {', '.join(policy.strategies)}; roles {', '.join(policy.upload_roles)}"
    if policy.availability:
        line += f"; trains {', '.join(policy.availability)}"
    if policy.census_matches and not policy.sends_hashes:
        line += "; census_matches has no effect, because privacy_required lets no exact hash of a row leave"
    return line


def check_name(kit: Kit) -> str:
    host, _ = _server(kit)
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise UserError(f"the server's name {host} does not resolve ({error.strerror}).") from error
    return f"{host} is {', '.join(found)}"


def check_tls(kit: Kit) -> str:
    host, port = _server(kit)
    context = server_context(kit)
    try:
        with (
            socket.create_connection((host, port), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=host) as wrapped,
        ):
            certificate = wrapped.getpeercert()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == EXPIRED:
            raise UserError(
                "the server's certificate has expired, or this machine's clock is wrong: ask the server to "
                "renew it (fedfrozen site renew, there)."
            ) from error
        raise UserError(
            f"the server's certificate is not this federation's ({error.verify_message}): do not go on."
        ) from error
    except ssl.SSLError as error:
        raise UserError(f"{kit.superlink} does not speak TLS ({error.reason}): do not go on.") from error
    except OSError as error:
        raise UserError(f"{kit.superlink} cannot be reached ({error}): is a firewall in between?") from error
    until = ssl.cert_time_to_seconds(str((certificate or {})["notAfter"]))
    days = int((until - datetime.datetime.now(datetime.UTC).timestamp()) // 86400)
    return f"the server's certificate verifies, for {days} more days"


def check_key(kit: Kit) -> str:
    key = key_of(kit.folder / "node.key")
    if running(kit.meeting / "supernode.lock"):
        return server_contact(kit)
    guards = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    )
    context = server_context(kit)
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    try:
        with FleetHttpClient(f"https://{kit.superlink}", interceptors=guards, verify=context) as client:
            node = client.ActivateNode(request).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except httpx.HTTPStatusError as error:
        raise UserError(
            "the server has not admitted this site, or somebody uses its key now: ask it to run `fedfrozen "
            "server admit` with this kit's node.crt."
        ) from error
    except httpx.HTTPError as error:
        raise UserError(f"the server could not be asked ({error}).") from error
    return f"registered, as node {node}"


def check_data(kit: Kit) -> str:
    policy = Policy.read(kit.policy)
    return "; ".join(f"{name}: {check_view(view, policy)}" for name, view in kit.views.items())


def check_view(view: View, policy: Policy) -> str:
    if view.path is not None and view.kind != "hub" and not Path(view.path).exists():
        raise UserError(
            f"{view.path} does not exist: set the path of the view {view.name} to where its data lie."
        )
    config = replace(compose_run([]).config, dataset=view.dataset())
    corpus = load_corpus(config, None, view.classes and wire_classes(view), site=True)
    if view.kind == "table" and view.columns is None:
        found = ", ".join(corpus.preprocessing.columns if corpus.preprocessing else ())
        raise UserError(
            f"the view {view.name} does not say its columns, and no run can use it: write those of "
            f"columns: [{found}] that a model may read."
        )
    if view.classes is None and view.has_classes:
        found = ", ".join(corpus.classes)
        raise UserError(
            f"the view {view.name} does not say its classes, and no run can use it: write classes: "
            f"[{found}], and those that only other sites have."
        )
    rows, least = len(corpus.train), policy.min_examples
    if rows < least:
        raise UserError(f"{counted(rows, 'row')} to train on, fewer than the policy's min_examples={least}.")
    classes = f", classes {', '.join(corpus.classes[:10])}" if corpus.classes else ""
    columns = f", columns {', '.join(view.columns[:10])}" if view.columns else ""
    return f"{counted(rows, 'row')} to train on{classes}{columns}"


def wire_classes(view: View) -> tuple[str, ...]:
    """The classes as a run names them: for entities the steward may have written types instead of tags."""
    own = view.classes or ()
    tasks = getattr(registry.find("datasets", view.kind), "tasks", ())
    entities = view.task == "entities" or (view.task is None and tasks[:1] == ("entities",))
    return view.tags if entities and "O" not in own else own


def check_disk(kit: Kit) -> str:
    try:
        kit.var.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{kit.var} cannot be written ({error.strerror}): it must be a folder.") from error
    free = shutil.disk_usage(kit.var).free / 1e9
    needed = kit.cache_gb + MIN_FREE_GB
    if free < needed:
        raise UserError(f"{free:.1f} GB free in {kit.var}, {needed:.1f} needed: make room or lower cache_gb.")
    return f"{free:.0f} GB free"


def check_record(kit: Kit) -> str:
    entries = read_audit(kit.audit)
    budget = SiteBudget(kit.var / "state" / "budget.json")
    budget.check(AuditLog(kit.audit))
    epsilon, delta = budget.spent()
    return f"{len(entries)} entries, unbroken; epsilon {epsilon:g} and delta {delta:g} spent"


def _server(kit: Kit) -> tuple[str, int]:
    host, _, port = kit.superlink.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"superlink: {kit.superlink} in site.yaml is not HOST:PORT.")
    return host.strip("[]"), int(port)


CHECKS: dict[str, Callable[[Kit], str]] = {
    "files": check_files,
    "kit": check_kit,
    "certificate": check_certificate,
    "policy": check_policy,
    "name": check_name,
    "TLS": check_tls,
    "key": check_key,
    "SuperNode": check_supernode,
    "executor": check_executor,
    "data": check_data,
    "disk": check_disk,
    "audit log": check_record,
}
