"""`fedfrozen site check [KIT]`: in plain words, whether this site can take part; `site audit`: its record."""

import datetime
import json
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL  # internal
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest  # internal
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor  # internal
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # internal
from flwr.supernode.fleet_http_client import FleetHttpClient  # internal
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # internal

from fedfrozen_app import registry
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.errors import UserError
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.audit_log import AuditLog, check_anchors, read_audit
from fedfrozen_app.sites.authority import problem_of, read_certificate, read_trusted
from fedfrozen_app.sites.executor import NAME as EXECUTOR
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import Contact, SuperNodeClient, is_stranger, running
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request import key_of
from fedfrozen_app.sites.sign import ask, last_sign, processor_time
from fedfrozen_app.sites.store import Budget
from fedfrozen_app.sites.supernode import server_context
from fedfrozen_app.sites.views import View
from fedfrozen_app.verb_table import parse
from fedfrozen_app.words import counted

MIN_FREE_GB = 2.0
RENEW_DAYS = 14
PATIENCE = 10.0  # seconds, for an answer on this machine
SILENCE = 60.0  # seconds without an answer of the server, which is asked every three
LOOK = 2.0  # seconds, to see whether a process computes
EXPIRED = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
SECRETS = ("node.key", "link.pem")
HIDDEN_FIELDS = (
    "time",
    "event",
    "salt",
    "previous",
    "digest",
    "bundle",
)  # of an entry, where it is shown in a line


def main(arguments: list[str]) -> None:
    """The verb: every check on its own line; exit code 2 when one of them fails."""
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


def audit(arguments: list[str]) -> None:
    """`fedfrozen site audit [KIT]`: the audit log, one line an event."""
    options = parse("site audit", arguments)
    kit = Kit.read(options.kit)
    for entry in read_audit(kit.audit):
        head = f"{entry['time'][:19]}  {entry['event']:8}"
        if entry["event"] == "sent":
            epsilon = "" if entry["epsilon"] is None else f", epsilon {entry['epsilon']:g}"
            again = ", again" if entry.get("again") else ""
            print(
                f"{head}run {entry['run']} round {entry['round']}: {counted(len(entry['arrays']), 'array')}, "
                f"{entry['bytes']} bytes from {counted(entry['examples'], 'example')}{epsilon}{again}"
            )
        else:
            rest = {k: v for k, v in entry.items() if k not in HIDDEN_FIELDS}
            print(f"{head}{json.dumps(rest)}")
    if options.anchors is not None:
        told = check_anchors(kit.audit, kit.name, options.anchors)
        print(f"The log holds all of the {counted(told, 'anchor')} that {options.anchors} has of {kit.name}.")


def check_files(kit: Kit) -> str:
    for name in SECRETS:
        path = kit.folder / name
        if not path.exists() and name != "link.pem":  # which the site makes at its first start
            raise UserError(f"{path} is missing: ask for the kit again.")
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UserError(f"others can read {path}: chmod 600 {path}.")
    return f"the secrets of {kit.folder} are its owner's alone"


def check_kit(kit: Kit) -> str:
    """What the authority handed out is still that; site.yaml and policy.yaml are the site's own."""
    found = manifest.check(kit.folder)
    if found.role != "site" or found.name != kit.name:
        raise UserError(
            f"the kit was signed for the {found.role} {found.name}, and site.yaml says {kit.name}."
        )
    return f"{counted(len(found.files), 'file')} as signed; site.yaml and policy.yaml are yours to change"


def check_certificate(kit: Kit) -> str:
    """This site's own, which the server's proxy asks for."""
    certificate = read_certificate(kit.folder / "node.crt")
    if problem := problem_of(certificate, read_trusted(kit.folder / "ca.crt")):
        raise UserError(f"{problem}: `fedfrozen site renew`, and send the request to the authority.")
    days = (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if days < RENEW_DAYS:
        raise UserError(f"it ends in {counted(days, 'day')}: `fedfrozen site renew` now, before it does.")
    return f"good for {days} more days"


def check_policy(kit: Kit) -> str:
    policy = Policy.read(kit.policy)
    return f"strategies {', '.join(policy.strategies)}; roles {', '.join(policy.upload_roles)}"


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
        return _standing(kit)
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


def _standing(kit: Kit) -> str:
    """What the running SuperNode says of the server; a second one could not ask with the same key."""
    found = _contact(kit)
    if found.node is None or found.heard is None:
        raise UserError("the server has not let this site's SuperNode in yet: see its log, supernode.sh.")
    now = time.monotonic()
    silent = now - found.heard
    if silent > SILENCE:
        raise UserError(f"the server has not answered this site's SuperNode for {silent:.0f} s.")
    if found.beat is not None and now - found.beat > 2 * SILENCE:
        raise UserError(
            f"the server has taken no heartbeat of this site's SuperNode for {now - found.beat:.0f} s, and "
            "counts it as gone: see its log, supernode.sh."
        )
    return f"registered, as node {found.node}; the server answered {silent:.0f} s ago"


def _contact(kit: Kit) -> Contact:
    try:
        with SuperNodeClient(kit) as desk:
            return desk.contact(PATIENCE)
    except httpx.HTTPError as error:
        what = "is not of this kit" if is_stranger(error) else f"did not answer well within {PATIENCE:g} s"
        raise UserError(f"what listens in {kit.meeting} {what} ({error}): start it again.") from error


def check_supernode(kit: Kit) -> str:
    """Asked over its socket, as the executor does: a process that is there may still answer nothing."""
    if not running(kit.meeting / "supernode.lock"):
        return "not started"
    began = time.perf_counter()
    _contact(kit)
    return f"answers, after {1000 * (time.perf_counter() - began):.0f} ms"


def check_executor(kit: Kit) -> str:
    """Asked, as its loop is the one to answer; at work it cannot, and then its notes tell."""
    if not running(kit.var / "executor.lock"):
        return "not started"
    sign = last_sign(kit.meeting, EXECUTOR)
    if sign is None:
        return "starting"
    now = time.monotonic()
    silent, long = now - sign.seen, now - sign.since
    if sign.state == "alone":
        raise UserError(f"no SuperNode answers it, for {long:.0f} s: start supernode.sh, see its log.")
    if sign.state == "without room":
        raise UserError(f"its work waits, because the disk of {kit.var} is full: make room there.")
    if sign.state != "waiting":
        if now > sign.until:
            raise UserError(
                f"it is {sign.state} for {long:.0f} s, longer than limits in site.yaml allow: it hangs. Its "
                "watchdog starts it again; without one (--unguarded) do it yourself."
            )
        if sign.state == "working" and long > PATIENCE and not computes(sign.pid, LOOK):
            raise UserError(
                f"it is at one message for {long:.0f} s and did not compute in the last {LOOK:g} s: it waits "
                "for a disk, or hangs. Look again, and if it stays so start it again."
            )
        return f"at work on a message ({sign.state}), for {long:.0f} s"
    took = ask(kit.meeting, EXECUTOR, PATIENCE)
    if took is None:
        raise UserError(
            f"it did not answer within {PATIENCE:g} s, and has looked for no message for "
            f"{silent + PATIENCE:.0f} s: it hangs. Start it again."
        )
    return f"waits for messages, and answers, after {1000 * took:.0f} ms"


def computes(pid: int, seconds: float) -> bool:
    """Whether a process uses the processor, watched for so long."""
    try:
        before = processor_time(pid)
        time.sleep(seconds)
        return processor_time(pid) > before
    except OSError:  # it has ended meanwhile, and its lock will say so
        return False


def check_data(kit: Kit) -> str:
    policy = Policy.read(kit.policy)
    return "; ".join(f"{name}: {check_view(view, policy)}" for name, view in kit.views.items())


def check_view(view: View, policy: Policy) -> str:
    if view.path is not None and view.kind != "hub" and not Path(view.path).exists():
        raise UserError(
            f"{view.path} does not exist: set the path of the view {view.name} to where its data lie."
        )
    config = replace(read(resolved(compose_config([]))), dataset=view.dataset())
    corpus = load_corpus(config, None, view.classes and wire_classes(view), site=True)
    if view.classes is None:
        found = ", ".join(corpus.classes)
        raise UserError(
            f"the view {view.name} does not say its classes, and no run can use it: write classes: "
            f"[{found}], and those that only other sites have."
        )
    rows, least = len(corpus.train), policy.min_examples
    if rows < least:
        raise UserError(f"{counted(rows, 'row')} to train on, fewer than the policy's min_examples={least}.")
    return f"{counted(rows, 'row')} to train on, classes {', '.join(corpus.classes[:10])}"


def wire_classes(view: View) -> tuple[str, ...]:
    """As a run names them: for entities the steward may have written types in place of tags."""
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
    budget = Budget(kit.var / "state" / "budget.json")
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
