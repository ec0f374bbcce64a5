"""`fedfrozen server link|admit|revoke [KIT]`: Flower's SuperLink, and the parties that it admits.

Flower serves the Control API, which has no authentication, on the same port as everything else. This
SuperLink has no port: it listens on a socket in a folder that only its own account can enter. The proxy in
front of it lets sites reach the Fleet API, operators the Control API, and on 127.0.0.1 the server's own
processes the Runtime API, which requires a secret.
"""

import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn

from fedfrozen_app.core.certificates import who
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    FLWR_INTERNAL_GRPC_CONTROL_API,
    FLWR_INTERNAL_GRPC_FLEET_API,
    ControlHttpClient,
    ListNodesRequest,
    ListNodesResponse,
    RegisterNodeRequest,
    SuperLinkLifespan,
    UnregisterNodeRequest,
    create_superlink_app,
    get_uvicorn_log_config,
    parse_superlink_arguments,
    public_key_to_bytes,
)
from fedfrozen_app.core.logs import hide, prepare_logging, uvicorn_config
from fedfrozen_app.core.slow_starts import allow_slow_starts
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites import admitted, manifest
from fedfrozen_app.sites.control import SOCKET as NAME
from fedfrozen_app.sites.control import control
from fedfrozen_app.sites.link import listening, running

log = logging.getLogger(__name__)
PATIENCE = 60.0  # seconds for a SuperLink that is about to listen
ASKED = ("ControlServicer.ListNodes", "ControlServicer.ListRuns")  # lines of Flower's
START = 300.0  # seconds for a run's process to start: many imports, perhaps on a busy machine
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
        os.environ.pop(
            name, None
        )  # Flower's older servers would open ports of their own, without authentication
    allow_slow_starts(START)
    with listening(folder / "run", NAME) as bound:
        # Flower reads its settings from the command line. It requires certificates before it authenticates
        # nodes; TLS itself ends at the proxy.
        sys.argv = ["flower-superlink", *(word.replace("{}", str(folder)) for word in FLAGS.split())]
        app = create_superlink_app(parse_superlink_arguments(), SuperLinkLifespan)
        prepare_logging()  # again: Flower has added its own handlers
        hide((folder / "superexec.secret").read_bytes().strip())
        logging.getLogger("flwr").addFilter(is_news)
        settings = uvicorn_config(get_uvicorn_log_config(logging.INFO))
        config = uvicorn.Config(app, loop="asyncio", access_log=False, log_config=settings, workers=1)
        log.info("The SuperLink listens in %s, and on no port.", folder / "run")
        # Registers the parties admitted earlier or while it was down, over its own API, once that answers.
        threading.Thread(target=_register_known, args=(folder,), name="registration", daemon=True).start()
        uvicorn.Server(config).run([bound])


def is_news(record: logging.LogRecord) -> bool:
    """False for the requests that `fedfrozen server metrics` sends every few seconds."""
    return record.getMessage() not in ASKED


def admit(arguments: list[str]) -> None:
    """`fedfrozen server admit KIT [CERTIFICATE ...]`: admit parties; without one, all known ones."""
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
        print("The SuperLink does not run: it learns their keys when it starts.")
        return
    for name, is_new in register(folder).items():
        print(f"{name}: registered{'' if is_new else ' before'}")


def register(folder: Path) -> dict[str, bool]:
    """Tell the SuperLink the keys of all admitted sites; by name, whether a key is new to it."""
    found: dict[str, bool] = {}
    with _one_at_a_time(folder / "run" / "admit.lock"), control(folder) as client:
        known = _nodes(client)
        for name, certificate in admitted.admitted(folder).items():
            if who(certificate.subject)[1] != "site":
                continue
            key = public_key_to_bytes(certificate.public_key())  # type: ignore[arg-type]
            for old in [node for node, other in known.get(name, []) if other != key]:
                client.UnregisterNode(UnregisterNodeRequest(node_id=old))
            found[name] = all(other != key for _, other in known.get(name, []))
            if found[name]:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
    return found


def _register_known(folder: Path) -> None:
    try:
        if new := [name for name, is_new in register(folder).items() if is_new]:
            log.info("Registered the admitted sites %s.", ", ".join(new))
    except (UserError, httpx.HTTPError) as error:
        log.warning("The admitted sites were not registered (%s): run `fedfrozen server admit`.", error)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in this block: a key is registered once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def revoke(arguments: list[str]) -> None:
    """`fedfrozen server revoke KIT NAME`: refuse a party from now on."""
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
    """Retried, because a SuperLink that is starting has its lock and its socket before it listens."""
    while True:
        try:
            return client.ListNodes(ListNodesRequest())
        except httpx.TransportError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"The SuperLink does not answer ({error}): see its log, start it again, and repeat this."
                ) from error
        time.sleep(0.5)


def _reload_proxy(folder: Path) -> None:
    """Let a running nginx read its list again."""
    try:
        os.kill(int((folder / "nginx.pid").read_text()), signal.SIGHUP)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        print("The proxy does not run: it reads the list when it starts.")
