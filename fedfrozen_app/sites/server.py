"""`fedfrozen server link|admit|revoke [KIT]`: Flower's SuperLink, and whom it lets in.

Flower puts the Control API, which asks for nothing, on the same port as everything else. This SuperLink has
no port: it listens at a socket in a folder that only its own account enters. The proxy in front of it lets
sites to the Fleet API, holders of an operator's certificate to the Control API, and on 127.0.0.1 the server's
own processes to the Runtime API, which asks for a secret. Names marked internal are no public API of
Flower's.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import uvicorn
from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API  # internal
from flwr.proto.control_pb2 import (  # internal
    ListNodesRequest,
    ListNodesResponse,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient  # internal
from flwr.supercore.http_logging import get_uvicorn_log_config  # internal
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # internal
from flwr.superlink.cli.flower_superlink import (  # internal
    SuperLinkLifespan,
    _parse_superlink_lifespan_config,
)
from flwr.superlink.main import create_app  # internal

from fedfrozen_app.errors import UserError
from fedfrozen_app.sites import admitted, manifest
from fedfrozen_app.sites.authority import who
from fedfrozen_app.sites.link import listening, open_folder, running, short
from fedfrozen_app.verb_table import parse

log = logging.getLogger(__name__)
NAME = "superlink"
PATIENCE = 60.0  # seconds for a SuperLink that is about to listen
FLAGS = (
    "--isolation process --enable-supernode-auth --disable-runtime-dependency-installation "
    "--database {}/state.db --superexec-auth-secret-file {}/superexec.secret "
    "--ssl-ca-certfile {}/ca.crt --ssl-certfile {}/server.crt --ssl-keyfile {}/server.key"
)


def _folder(path: Path) -> Path:
    folder = path.expanduser().resolve()
    if not (folder / "server.yaml").exists():
        raise UserError(f"{folder} is no server's kit (it has no server.yaml): give the folder of one.")
    return folder


def link(arguments: list[str]) -> None:
    """`fedfrozen server link KIT`: the SuperLink."""
    folder = _folder(parse("server link", arguments).kit)
    manifest.check(folder)
    os.umask(0o077)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # Flower's older servers would open ports of their own, without a guard
    with listening(folder / "run", NAME) as bound:
        # Flower reads its settings from the command line. It wants certificates before it lets nodes show
        # keys; TLS itself ends at the proxy, and its words come over the socket.
        sys.argv = ["flower-superlink", *(word.replace("{}", str(folder)) for word in FLAGS.split())]
        app = create_app(_parse_superlink_lifespan_config(), SuperLinkLifespan)
        settings = get_uvicorn_log_config(logging.INFO)
        config = uvicorn.Config(app, loop="asyncio", access_log=False, log_config=settings, workers=1)
        log.info("The SuperLink listens in %s, and on no port.", folder / "run")
        uvicorn.Server(config).run([bound])


def admit(arguments: list[str]) -> None:
    """`fedfrozen server admit KIT [CERTIFICATE ...]`: let parties in; without one, all that were before."""
    options = parse("server admit", arguments)
    folder = _folder(options.kit)
    for path in options.certificates:
        try:
            name, role = admitted.admit(folder, path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): give a certificate.") from error
        print(f"{name}: admitted, as {'an operator' if role == 'operator' else 'a site'}")
    admitted.write_list(folder)
    _reload_proxy(folder)
    if not running(folder / "run" / f"{NAME}.lock"):
        print("The SuperLink does not run: once it does, `fedfrozen server admit` again tells it the keys.")
        return
    with control(folder) as client:
        known = _nodes(client)
        for name, certificate in admitted.admitted(folder).items():
            if who(certificate.subject)[1] != "site":
                continue
            key = public_key_to_bytes(certificate.public_key())  # type: ignore[arg-type]
            for old in [node for node, other in known.get(name, []) if other != key]:
                client.UnregisterNode(UnregisterNodeRequest(node_id=old))
            if any(other == key for _, other in known.get(name, [])):
                print(f"{name}: registered before")
                continue
            client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            print(f"{name}: registered")


def revoke(arguments: list[str]) -> None:
    """`fedfrozen server revoke KIT NAME`: a party is turned away from now on."""
    options = parse("server revoke", arguments)
    folder = _folder(options.kit)
    path = folder / "admitted" / f"{options.name}.crt"
    if options.name not in admitted.admitted(folder):
        raise UserError(f"No {options.name} is admitted: say one of {', '.join(admitted.admitted(folder))}.")
    path.unlink()
    admitted.write_list(folder)
    _reload_proxy(folder)
    if running(folder / "run" / f"{NAME}.lock"):
        with control(folder) as client:
            for node, _ in _nodes(client).get(options.name, []):
                client.UnregisterNode(UnregisterNodeRequest(node_id=node))
    print(f"{options.name}: revoked. Take it out of federation.yaml too.")


def _nodes(client: ControlHttpClient) -> dict[str, list[tuple[int, bytes]]]:
    """The registered nodes by name: (id, public key)."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for node in _list(client, time.monotonic() + PATIENCE).nodes_info:
        if node.status != "unregistered":
            found.setdefault(node.name, []).append((node.node_id, node.public_key))
    return found


def _list(client: ControlHttpClient, until: float) -> ListNodesResponse:
    """A SuperLink that has just begun has its lock and its socket before it listens."""
    while True:
        try:
            return client.ListNodes(ListNodesRequest())
        except httpx.TransportError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"The SuperLink does not answer ({error}): see its log, start it again, and repeat this."
                ) from error
        time.sleep(0.5)


def control(folder: Path) -> ControlHttpClient:
    """Flower's Control API by the socket, for whoever may enter the server's own folder."""
    client = ControlHttpClient("http://superlink", verify=False)
    client._client.close()
    number = open_folder(folder / "run")  # open until the process ends, which is soon
    transport = httpx.HTTPTransport(uds=short(number, NAME))
    client._client = httpx.Client(transport=transport, timeout=30, trust_env=False)
    return client


def _reload_proxy(folder: Path) -> None:
    """Let a running nginx read its list again."""
    try:
        os.kill(int((folder / "nginx.pid").read_text()), signal.SIGHUP)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        print("The proxy does not run: it reads the list when it starts.")
