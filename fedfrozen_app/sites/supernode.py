"""`fedfrozen site node [KIT]`: Flower's SuperNode, which calls the server and opens no port.

Flower's own command can only meet its executor on a TCP port. This one puts the same parts together, with the
kit's socket in the port's place. Names marked internal are no public API of Flower's.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import httpx
import uvicorn
from fastapi import FastAPI
from flwr.common.constant import ISOLATION_MODE_PROCESS, ISOLATION_MODE_SUBPROCESS  # internal
from flwr.proto.fleet_pb2 import (  # internal
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse  # internal
from flwr.proto.message_pb2 import (  # internal
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node  # internal
from flwr.proto.run_pb2 import GetRunRequest  # internal
from flwr.supercore.exit import add_exit_handler  # internal
from flwr.supercore.protobuf.client import ProtobufClientInterceptor  # internal
from flwr.supercore.retry import RetryInvoker  # internal
from flwr.supernode import fleet_http_connection  # internal
from flwr.supernode.fleet_http_client import FleetHttpClient  # internal
from flwr.supernode.main import create_app  # internal
from flwr.supernode.start_client_internal import start_client_internal  # internal

from fedfrozen_app.errors import UserError
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.inbox import Inbox, InboxFactory
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import BEGIN, CONTACT, NAME, Contact, Patience, context, listening
from fedfrozen_app.sites.request import key_of
from fedfrozen_app.sites.sign import Note
from fedfrozen_app.verb_table import parse

GRACE = 5.0  # seconds for requests under way, when it ends


def main(arguments: list[str]) -> None:
    """The verb."""
    options = parse("site node", arguments)
    kit = Kit.read(options.kit)
    manifest.check(kit.folder)
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
        with socket.create_server(("127.0.0.1", 0)) as bound:  # Flower's processes know ports alone
            _serve(states, contact, bound, None)
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            own = {"site": kit.name} | ({"data-path": view.path} if view.path else {})
            connect(isolation=ISOLATION_MODE_SUBPROCESS, runtime_api_address=address, node_config=own)
        return
    with listening(kit.meeting, NAME) as bound:
        _serve(states, contact, bound, context(kit, server=True))
        connect(isolation=ISOLATION_MODE_PROCESS, node_config={})


def _serve(states: InboxFactory, contact: Contact, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Let the executor in, beside the loop that asks the server for messages."""
    app = desk_of(states, contact)
    config = uvicorn.Config(app, loop="asyncio", access_log=False, log_level="warning", workers=1)
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    # A daemon: where the server cannot be asked at all, the process ends with a sentence.
    thread = threading.Thread(target=server.run, args=([bound],), name="executor's desk", daemon=True)
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


def desk_of(states: InboxFactory, contact: Contact) -> FastAPI:
    """What the executor can ask: Flower's own questions, and two more."""
    app = create_app(states)
    app.add_api_route(CONTACT, lambda: asdict(contact))
    app.add_api_route(BEGIN, states.inbox.executor_began, methods=["POST"])
    return app


def _connect(kit: Kit, states: InboxFactory, contact: Contact, max_retries: int | None, **how: Any) -> None:
    """Flower's own loop: ask the server for messages, hand the answers in, until the process ends."""
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


def server_context(kit: Kit) -> ssl.SSLContext:
    """TLS with the server: it must be of the federation's authority, and gets this site's certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_verify_locations(kit.folder / "ca.crt")
        made.load_cert_chain(kit.folder / "node.crt", kit.folder / "node.key")
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"ca.crt, node.crt or node.key of {kit.folder} cannot be read ({error}): install the kit again."
        ) from error
    return made


def was_cut(error: BaseException | None) -> bool:
    """Whether the link ended in the middle of a handshake; a certificate that is refused is another thing."""
    while error is not None:
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def use_client_of(kit: Kit, contact: Contact, inbox: Inbox) -> None:
    """Let Flower use a client that shows this site's certificate, and sees to it that nothing hangs.

    Flower's SuperNode knows no client certificates, and makes its client in one place: it is put there.
    """
    note = Note(kit.meeting, NAME)
    limit = kit.limits.transfer
    patience = Patience(limit)

    class OfThisKit(FleetHttpClient):
        @classmethod
        def from_server_address(
            cls,
            server_address: str,
            insecure: bool,
            root_certificates: bytes | str | None,
            interceptors: Sequence[ProtobufClientInterceptor],
            *,
            retry_invoker: RetryInvoker | None = None,
        ) -> Self:
            return cls(
                f"https://{server_address}",
                interceptors=interceptors,
                verify=server_context(kit),
                retry_invoker=retry_invoker,
            )

        def _unary_unary(self, **request: Any) -> Any:
            try:
                return super()._unary_unary(**request)
            except httpx.TransportError as error:
                if not was_cut(error):
                    raise
                # Flower ends the process where an error names SSL: a link that was cut is tried again.
                raise httpx.ReadError("the connection was cut while it was made") from error

        def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:
            note.write("asking", limit)
            inbox.abandon()
            answer = super().PullMessages(request)
            contact.node, contact.heard = request.node.node_id, time.monotonic()
            inbox.run_is_over = partial(self.is_over, request.node)
            patience.progress()
            return answer

        def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
            note.write("fetching a message", limit)
            return patience.check(request, super().PullObject(request))

        def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:
            note.write("sending an answer", limit)
            return super().PushMessages(request)

        def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:
            note.write("sending an answer", limit)
            return super().PushObject(request)

        def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:
            try:
                answer = super().SendNodeHeartbeat(request)
                if not answer.success:
                    raise httpx.RemoteProtocolError("the server does not know this site's SuperNode")
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:  # then Flower ends the process
                    raise
                # Anything else would end Flower's heart and nothing besides: it beats again a little later.
                raise httpx.RemoteProtocolError(str(error)) from error
            contact.beat = time.monotonic()
            return answer

        def is_over(self, node: Node, run: int) -> bool:
            """Whether the server says that this run has ended; where it says nothing it may go on."""
            try:
                self.GetRun(GetRunRequest(node=node, run_id=run))
            except httpx.HTTPStatusError as error:
                return error.response.status_code == httpx.codes.FORBIDDEN
            except httpx.HTTPError:
                return False
            return False

    inbox.sign_of_life = partial(note.write, "waiting for the executor", limit)
    fleet_http_connection.FleetHttpClient = OfThisKit  # type: ignore[misc]
