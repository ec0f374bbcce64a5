"""`fedfrozen site node [KIT]`: Flower's SuperNode, which calls the server and opens no port.

Flower's own command supports only a TCP port between SuperNode and executor. This one assembles the same
parts with the kit's socket in place of the port.
"""

import os
import socket
import ssl
import threading
import time
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    ISOLATION_MODE_PROCESS,
    ISOLATION_MODE_SUBPROCESS,
    add_exit_handler,
    create_supernode_app,
    start_client_internal,
)
from fedfrozen_app.core.logs import hide, logs_of, prepare_logging, uvicorn_config
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.fleet_client import use_client_of
from fedfrozen_app.sites.inbox import InboxFactory
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import BEGIN, CONTACT, NAME, Contact, context, listening
from fedfrozen_app.sites.request import key_of

GRACE = 5.0  # seconds for pending requests at shutdown


def main(arguments: list[str]) -> None:
    """The verb."""
    options = parse("site node", arguments)
    kit = Kit.read(options.kit)
    manifest.check(kit.folder)
    prepare_logging()  # again: Flower has added its own handlers
    logs_of(site=kit.name)
    hide(kit.match_key)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    states, contact = InboxFactory(), Contact()
    connect = partial(_connect, kit, states, contact, options.max_retries)
    if options.run_code_of_server:
        view = kit.view(None)
        if view is None:
            raise UserError(
                f"{kit.folder}/site.yaml has several views, and Flower's own way knows one path only."
            )
        print("The server's code runs here now, and policy.yaml is not asked.", flush=True)
        with socket.create_server(("127.0.0.1", 0)) as bound:  # Flower's processes only know ports
            _serve(states, contact, bound, None)
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            own = {"site": kit.name} | ({"data-path": view.path} if view.path else {})
            connect(isolation=ISOLATION_MODE_SUBPROCESS, runtime_api_address=address, node_config=own)
        return
    with listening(kit.meeting, NAME) as bound:
        _serve(states, contact, bound, context(kit, server=True))
        connect(isolation=ISOLATION_MODE_PROCESS, node_config={})


def _serve(states: InboxFactory, contact: Contact, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Serve the executor in a thread, next to the loop that asks the server for messages."""
    app = executor_api(states, contact)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        access_log=False,
        log_config=uvicorn_config(uvicorn.config.LOGGING_CONFIG),
        log_level="warning",
        workers=1,
    )
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    # A daemon thread: if the server cannot be reached at all, the process ends with an error message.
    thread = threading.Thread(target=server.run, args=([bound],), name="executor API", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.05)
    if not server.started:
        raise UserError("The SuperNode could not listen for its executor: see above.")

    def stop() -> None:
        server.should_exit = True
        thread.join(GRACE)
        server.force_exit = True

    add_exit_handler(stop)


def executor_api(states: InboxFactory, contact: Contact) -> FastAPI:
    """The API for the executor: Flower's own, plus two routes."""
    app = create_supernode_app(states)
    app.add_api_route(CONTACT, lambda: contact.to_json())
    app.add_api_route(BEGIN, states.inbox.executor_began, methods=["POST"])
    return app


def _connect(kit: Kit, states: InboxFactory, contact: Contact, max_retries: int | None, **how: Any) -> None:
    """Flower's own loop: ask the server for messages and send the replies, until the process ends."""
    key = key_of(kit.folder / "node.key")
    use_client_of(kit, contact, states.inbox)
    start_client_internal(
        state_factory=states,
        server_address=kit.superlink,
        root_certificates=(kit.folder / "ca.crt").read_bytes(),
        insecure=False,
        authentication_keys=(key, key.public_key()),
        max_retries=max_retries,
        **how,
    )
