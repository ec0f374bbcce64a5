"""Who gets where at a running server: real SuperLink, SuperExec and nginx from kits, and many attempts."""

import gzip
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto import control_pb2, log_pb2, message_pb2, runtime_pb2
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StartRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.routers.runtime.router import router as runtime_router
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.runtimes.flower.processes import Children, flower_environment, free_port
from fedfrozen_app.sites import admitted
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.request import key_of
from fedfrozen_app.sites.server import control
from tests.sites.federation import federation, our_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Up for all tests of this file; they add parties and take them away."""
    with federation(tmp_path_factory.mktemp("doors") / "fed", ("north", "south")) as deployment:
        yield deployment


def tls(deployment, party=None, certificate=None):
    """What a party's software would use; None: somebody who has the public certificate alone."""
    made = ssl.create_default_context(cafile=deployment.kits / "north" / "ca.crt")
    if party is not None:
        stem = "operator" if party.startswith("operator") else "node"
        kit = deployment.kits / party
        shown = certificate or kit / f"{stem}.crt"
        # A kit from before a renewal has the key of its own certificate beside it.
        beside = shown.with_suffix(".key")
        made.load_cert_chain(shown, beside if beside.exists() else kit / f"{stem}.key")
    return made


def post(deployment, path, party=None, *, content=b"", port=None, certificate=None):
    url = f"https://127.0.0.1:{port or deployment.port}{path}"
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    with httpx.Client(verify=tls(deployment, party, certificate), timeout=30) as client:
        return client.post(url, content=content, headers=headers).status_code


HEAD = b"POST /v1/fleet/%b HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n%b\r\n\r\n"
START, LIST, PULL = "/v1/control/start-run", "/v1/control/list-runs", "/v1/fleet/pull-messages"


def test_each_door_has_its_guests(server):
    """400: no certificate at all. 403: a certificate of this federation, and not for this door."""
    assert [post(server, path) for path in (START, LIST, PULL)] == [400, 400, 400]
    assert [post(server, path, "north") for path in (START, LIST)] == [403, 403]
    assert post(server, PULL, "operator") == 403
    assert post(server, PULL, "north") == 401  # let through; Flower asks for the key's signature
    for path in ("/", "/health", "/docs", "/openapi.json", "/v1/runtime/acquire-task", "/v1/other"):
        for party in ("north", "operator"):
            assert post(server, path, party) == 404, path
    for path in (
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1//control/start-run",
    ):
        assert post(server, path, "north") in (400, 403, 404), path
    with control(server.kits / "server") as client:
        assert not client.ListRuns(ListRunsRequest()).run_dict


def test_an_operator_is_served(server):
    with ControlHttpClient(f"https://127.0.0.1:{server.port}", verify=tls(server, "operator")) as client:
        assert not client.ListRuns(ListRunsRequest()).run_dict
        assert len(client.ListNodes(ListNodesRequest()).nodes_info) >= 2


def test_no_port_leads_to_the_control_api_and_no_other_account_to_the_socket(server):
    """Only nginx listens; on 127.0.0.1 it leads to the Runtime API, which wants a secret."""
    for path in (START, LIST, PULL, "/", "/health"):
        assert post(server, path, port=server.internal) == 404, path
    listening = ports_of(server.started["server-superlink"]) | ports_of(server.started["server-superexec"])
    assert listening == set()
    assert ports_of(server.started["server-proxy"]) == {server.port, server.internal}
    where = server.kits / "server" / "run"
    assert where.stat().st_mode & 0o777 == 0o700 and where.stat().st_uid == os.geteuid()


def ports_of(pid: int) -> set[int]:
    """TCP ports on which this process, or one that it started, listens."""
    nodes = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may be gone meanwhile
            if int(path.read_text().rpartition(")")[2].split()[2]) == pid:  # its process group
                for link in (path.parent / "fd").iterdir():
                    nodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in nodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def test_the_runtime_api_asks_for_a_secret_or_a_token_everywhere(server):
    """Flower has it on 127.0.0.1, where every account of the machine can call it."""
    version = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    url = f"https://127.0.0.1:{server.internal}"
    with RuntimeHttpClient(url, interceptors=version, verify=tls(server)) as client:
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["SERVER_APP"]))
        methods = [name for name in vars(RuntimeHttpClient) if name[0].isupper()]
        assert len(methods) >= len(runtime_router.routes) - 1 > 15
        for name in methods:
            words = {"PushMessages": "PushAppMessages", "PullMessages": "PullAppMessages"}
            kind = f"{words.get(name, name)}Request"
            places = (runtime_pb2, message_pb2, log_pb2, control_pb2)
            request = next(getattr(place, kind) for place in places if hasattr(place, kind))()
            with pytest.raises(httpx.HTTPStatusError) as told:
                getattr(client, name)(request)
            assert told.value.response.status_code == 401, name


def test_limits(server):
    with suppress(httpx.WriteError):  # it may close before all has been sent
        assert post(server, START, "operator", content=b"x" * (17 * 2**20)) == 413
    raw = socket.create_connection(("127.0.0.1", server.port))
    with raw, tls(server, "north").wrap_socket(raw, server_hostname="127.0.0.1") as slow:
        slow.settimeout(20)
        slow.sendall(b"POST /v1/fleet/x HTTP/1.1\r\nHost: x\r\n")  # and never the rest
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""  # shown the door after ten seconds


def test_one_address_gets_so_many_connections(server):
    """Requests that begin and never end: the sixty-fifth is told so, and the others are still served."""
    context, head = tls(server, "north"), b"POST /v1/fleet/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        connections = []
        for _ in range(66):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connections.append(stack.enter_context(context.wrap_socket(raw, server_hostname="127.0.0.1")))
            connections[-1].sendall(head)
        connections[-1].settimeout(10)
        assert b" 429 " in connections[-1].recv(200)
    wait_for(lambda: post(server, LIST, "operator") == 200)


def test_two_large_requests_of_one_party_at_a_time(server):
    """Flower keeps a request in memory until it is whole, and only then asks for the node's key."""
    sizes = (b"Content-Length: 2000000000", b"Transfer-Encoding: chunked")
    for size in sizes:
        with ExitStack() as stack:
            said = [began_request(server, stack, b"push-object", size) for _ in range(3)]
            assert b" 429 " in said[2].recv(200)
            small = began_request(server, stack, b"pull-messages", b"Content-Length: 0")
            assert b" 401 " in small.recv(200)  # the others of this party are served
            other = began_request(server, stack, b"push-object", sizes[0], party="south")
            other.settimeout(1)
            with pytest.raises(TimeoutError):  # taken, and waited for
                other.recv(1)


def began_request(server, stack: ExitStack, path: bytes, size: bytes, party: str = "north") -> ssl.SSLSocket:
    raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
    made = stack.enter_context(tls(server, party).wrap_socket(raw, server_hostname="127.0.0.1"))
    made.sendall(HEAD % (path, size))
    return made


def test_a_stranger_s_half_connections_do_not_shut_the_others_out(server):
    """More than a list of connections is long; each has said hello, and nothing since."""
    made = ssl.create_default_context(cafile=server.kits / "north" / "ca.crt")
    outgoing = ssl.MemoryBIO()
    half = made.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        half.do_handshake()
    hello = outgoing.read()
    with ExitStack() as stack:
        for _ in range(900):  # more are our own system's limit on open files
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            raw.sendall(hello)
        assert post(server, LIST, "operator") == 200


def test_a_compressed_request_is_not_inflated(server):
    """A bomb in the place of a reply: what north sends is taken as it is, and is no message."""
    bomb = gzip.compress(bytes(300 * 2**20), 1)
    pid, url = server.started["server-superlink"], f"https://127.0.0.1:{server.port}/v1/fleet/push-messages"
    before = memory_of(pid)
    for encoding in ("gzip", "deflate, gzip", "zstd"):
        headers = {"content-type": "application/protobuf", "content-encoding": encoding}
        with httpx.Client(verify=tls(server, "north"), timeout=60) as client:
            assert client.post(url, content=bomb, headers=headers).status_code >= 400
    assert memory_of(pid) - before < 100 * 2**20
    assert post(server, LIST, "operator") == 200


def memory_of(pid: int) -> int:
    """The largest resident memory so far, in bytes, of this process and all that it started."""
    found, children = 0, [pid]
    while children:
        pid = children.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        found += 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        children += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


# Certificates that should not do ---------------------------------------------------------------------------


def test_an_expired_and_a_strange_certificate_are_turned_away(server, tmp_path):
    public = key_of(server.kits / "north" / "node.key").public_key()
    ours = Authority.read(server.kits / "authority", Passphrase())
    strange = Authority.make(tmp_path / "strange", None)
    for number, authority, days in ((1, ours, 0), (2, strange, 9)):
        made = authority.current.issue(public, "north", "site", days)
        path = tmp_path / f"{number}.crt"
        path.write_bytes(made.public_bytes(Encoding.PEM))
        assert post(server, PULL, "north", certificate=path) == 400
    # In order, but nobody admitted it: another of the same name and authority.
    path.write_bytes(ours.current.issue(public, "north", "operator", 9).public_bytes(Encoding.PEM))
    assert post(server, PULL, "north", certificate=path) == 403
    assert post(server, START, "north", certificate=path) == 403


def test_a_session_does_not_outlive_its_certificate(server, tmp_path):
    """With a session of before, TLS goes on without a look at the certificate."""
    kit, path = server.kits / "south", tmp_path / "short.crt"
    authority = Authority.read(server.kits / "authority", Passphrase())
    seconds = 40
    made = authority.current.issue(public_of(kit), "south", "site", seconds / 86400)
    ends = time.monotonic() + seconds
    path.write_bytes(made.public_bytes(Encoding.PEM))
    let_in(server, path)
    contexts = [ssl.create_default_context(cafile=kit / "ca.crt") for _ in range(2)]
    contexts[0].maximum_version = ssl.TLSVersion.TLSv1_2
    sessions = []
    try:
        for context in contexts:
            context.load_cert_chain(path, kit / "node.key")
            wait_for(lambda context=context: status_of(server, context)[0] == 401)  # let through, to Flower
            sessions.append(status_of(server, context)[1])
        assert time.monotonic() < ends, "the machine is too slow for this certificate"
        time.sleep(ends - time.monotonic() + 2)
        for context, session in zip(contexts, sessions, strict=True):
            assert status_of(server, context, session)[0] == 400
    finally:
        let_in(server, kit / "node.crt")


def public_of(kit: Path):
    return key_of(kit / "node.key").public_key()


def let_in(server, certificate: Path) -> None:
    """As `server admit` does, and sooner: a process of its own takes its time to start."""
    admitted.admit(server.kits / "server", certificate.read_bytes())
    os.kill(int((server.kits / "server" / "nginx.pid").read_text()), signal.SIGHUP)


def status_of(server, context, session=None) -> tuple[int, ssl.SSLSession | None]:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as wrapped,
    ):
        wrapped.sendall(HEAD % (b"pull-messages", b"Content-Length: 0"))
        return int(wrapped.recv(200).split()[1]), wrapped.session


def test_who_is_admitted_late_revoked_and_renewed(server, tmp_path):
    kits = server.kits
    plan = yaml.safe_load((server.folder / "federation.yaml").read_text())
    plan |= {"sites": ["north", "south", "west"], "operators": ["operator", "operator_two"]}
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(plan))
    assert command(["provision", str(path), "-o", str(kits)]) == 0
    done = server.server("admit")
    assert done.returncode == 0 and "west: registered" in done.stdout, done.stdout + done.stderr
    wait_for(lambda: post(server, LIST, "operator_two") == 200)
    assert activated(server, "west")

    # An operator goes: from now on nothing.
    assert server.server("revoke", "operator_two").returncode == 0
    wait_for(lambda: post(server, LIST, "operator_two") == 403)
    assert post(server, LIST, "operator") == 200

    # A site's key is renewed: the old certificate is out at the door, and the old key at Flower.
    shutil.copytree(kits / "west", kits / "node_before")
    assert command(["provision", str(path), "-o", str(kits), "--renew", "west"]) == 0
    assert server.server("admit").returncode == 0
    wait_for(lambda: post(server, PULL, "node_before") == 403)
    assert activated(server, "west")
    assert server.server("revoke", "west").returncode == 0
    wait_for(lambda: post(server, PULL, "west") == 403)
    assert not activated(server, "west")
    assert server.server("revoke", "west").returncode == 2


def test_a_superlink_lets_in_whom_it_was_told_to_admit_before_it_ran(tmp_path):
    """Before, the sites' keys stayed unknown until `server admit` was given once more."""
    plan = {"server": {"address": "127.0.0.1", "port": free_port()}, "sites": ["north", "south"]}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(plan))
    kit = tmp_path / "kits" / "server"
    assert command(["provision", str(tmp_path / "federation.yaml"), "-o", str(tmp_path / "kits")]) == 0
    with our_command(tmp_path / "bin"), Children(tmp_path) as children:
        children.start("superlink", ["sh", str(kit / "superlink.sh")], kit / "flwr")
        wait_for((kit / "run" / "superlink.sock").exists, 120)
        with control(kit) as client:
            wait_for(lambda: sorted(node.name for node in nodes(client)) == ["north", "south"], 120)
        assert command(["server", "admit", str(kit)]) == 0
        with control(kit) as client:
            assert len(nodes(client)) == 2  # each once


def nodes(client):
    with suppress(httpx.TransportError):  # it has its socket before it answers
        return client.ListNodes(ListNodesRequest()).nodes_info
    return []


def activated(deployment, site: str) -> bool:
    """Whether Flower takes this site's key, asked through the door."""
    key = key_of(deployment.kits / site / "node.key")
    guards = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    )
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    url = f"https://127.0.0.1:{deployment.port}"
    with FleetHttpClient(url, interceptors=guards, verify=tls(deployment, site)) as client:
        try:
            return bool(client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError:
            return False


def wait_for(condition, patience: float = 10) -> None:
    """nginx reads its list again a moment later."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Processes that should not do ------------------------------------------------------------------------------


def supernode(kit) -> str:
    """What a SuperNode of this kit says before it ends by itself."""
    return attempt(["fedfrozen", "site", "node", str(kit), "--max-retries", "0"], kit / "flwr")


def attempt(command_line, home) -> str:
    home.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command_line,
            env=flower_environment(home),
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it stayed connected: {error.output}") from error
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_supernodes_that_are_turned_away(server, tmp_path):
    north = server.kits / "north"
    server.start("north", "supernode")
    server.wait_for_line("north-supernode", "SuperNode ID")
    # A site's key and certificate, used by somebody else while their owner is online.
    thief = tmp_path / "thief"
    shutil.copytree(north, thief, ignore=shutil.ignore_patterns("var", "flwr", "run"))
    assert "Failed to" in supernode(thief)
    # A site of another federation, which was given this one's `ca.crt`: neither its kit nor its key will do.
    plan = {"server": {"address": "127.0.0.1", "port": server.port}, "sites": ["unknown"]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert command(["provision", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "others")]) == 0
    unknown = tmp_path / "others" / "unknown"
    # As it is: it must not talk to this server, which its authority does not know.
    assert "certificate" in supernode(unknown).lower()
    shutil.copy(north / "ca.crt", unknown / "ca.crt")
    assert "is not signed by the authority" in supernode(unknown)
    assert command(["site", "check", str(unknown)]) == 2
    # A plain-text client.
    plain = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{server.port}"]
    plain += ["--isolation", "process", "--port", str(free_port()), "--max-retries", "0"]
    assert "Failed to" in attempt(plain, tmp_path / "flwr")
    assert httpx.get(f"http://127.0.0.1:{server.port}/v1/fleet/").status_code == 400
    server.kill("north-supernode")


def test_runs_are_started_with_an_operator_s_kit_only(server, tmp_path, capsys):
    line = ["runtime=deployed", "dataset=images", f"dataset.path={tmp_path}", f"output_dir={tmp_path}/run"]
    assert command([*line, f"runtime.server_kit={server.kits}/server"]) == 2
    assert "starting runs needs an operator's" in capsys.readouterr().err
    assert command([*line, f"runtime.server_kit={server.kits}/north"]) == 2
    assert "is no operator's kit" in capsys.readouterr().err
    # A site that dresses up as one.
    false = tmp_path / "false"
    shutil.copytree(server.kits / "operator", false)
    shutil.copy(server.kits / "north" / "node.key", false / "operator.key")
    shutil.copy(server.kits / "north" / "node.crt", false / "operator.crt")
    with (
        ControlHttpClient(f"https://127.0.0.1:{server.port}", verify=tls(server, "north")) as client,
        pytest.raises(httpx.HTTPStatusError, match="403"),
    ):
        client.StartRun(StartRunRequest())
    with control(server.kits / "server") as client:
        assert not client.ListRuns(ListRunsRequest()).run_dict
