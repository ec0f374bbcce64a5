"""The SuperNode's HTTP client for the server: it presents the site's certificate, and no call hangs.

Flower's SuperNode does not support client certificates. It creates its client in one place, where this one is
substituted.
"""

import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import httpx

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    FleetHttpClient,
    GetRunRequest,
    Node,
    ObjectPullError,
    ProtobufClientInterceptor,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    RetryInvoker,
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
    use_fleet_client,
)
from fedfrozen_app.sites.clock_offset import ClockFile, offset_of
from fedfrozen_app.sites.inbox import Inbox
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import NAME, Contact, Patience
from fedfrozen_app.sites.sign import Note

LARGEST = 2**31  # bytes of a response: no piece of Flower's messages is larger
SPARE = 2**26  # bytes of a message besides its largest piece


def server_context(kit: Kit) -> ssl.SSLContext:
    """TLS with the server: verifies its certificate by the federation's authority, and presents this
    site's."""
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
    """Whether the connection was cut during the handshake, rather than a certificate refused."""
    while error is not None:
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Bounded(httpx.SyncByteStream):
    """A response of limited size: a server could otherwise send until this machine runs out of memory."""

    def __init__(self, content: httpx.SyncByteStream) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._content:
            size += len(piece)
            if size > LARGEST:
                raise httpx.ReadError("the server's answer is larger than any message can be")
            yield piece

    def close(self) -> None:
        self._content.close()


def limit_answer(response: httpx.Response) -> None:
    """Limit a response before its content is read."""
    if "content-encoding" in response.headers:  # a few bytes could decompress to more than fits in memory
        raise httpx.DecodingError("the server's answer is compressed, which none of Flower's is")
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = Bounded(response.stream)


class MessageSize:
    """Drops a message larger than any that an honest server sends, whose arrays travel as one piece: the
    pieces of a message stay in memory until it is complete."""

    def __init__(self) -> None:
        self._size, self._lock = 0, threading.Lock()  # pieces travel in several threads

    def begin(self) -> None:
        with self._lock:
            self._size = 0

    def add(self, piece: PullObjectRequest, answer: PullObjectResponse) -> PullObjectResponse:
        with self._lock:
            self._size += len(answer.object_content)
            if self._size > LARGEST + SPARE:
                raise ObjectPullError(piece.object_id, "its message is larger than any can be")
        return answer


@dataclass(frozen=True)
class SiteConnection:
    """What the client of one site reads and updates."""

    kit: Kit
    contact: Contact
    inbox: Inbox
    note: Note  # of the SuperNode's state, for the watchdog
    patience: Patience
    size: MessageSize
    clock: ClockFile

    def report(self, state: str) -> None:
        self.note.write(state, self.kit.limits.transfer)


class SiteFleetClient(FleetHttpClient):
    """Flower creates it from the server's address alone, so a subclass holds the rest as an attribute."""

    connection: ClassVar[SiteConnection]

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
        made = cls(
            f"https://{server_address}",
            interceptors=interceptors,
            verify=server_context(cls.connection.kit),
            retry_invoker=retry_invoker,
        )
        made._client.event_hooks["response"] += [limit_answer, cls.read_clock]
        return made

    @classmethod
    def read_clock(cls, response: httpx.Response) -> None:
        if (offset := offset_of(response.headers.get("date"))) is not None:
            cls.connection.clock.note(offset)

    def _unary_unary(self, **request: Any) -> Any:
        try:
            return super()._unary_unary(**request)
        except httpx.TransportError as error:
            if not was_cut(error):
                raise
            # Flower ends the process if an error names SSL; a connection that was cut is retried instead.
            raise httpx.ReadError("the connection was cut while it was made") from error

    def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:
        site = self.connection
        site.report("asking")
        site.inbox.abandon()
        site.size.begin()
        began = time.monotonic()
        answer = super().PullMessages(request)
        site.contact.meter.asked(time.monotonic() - began)
        site.contact.node, site.contact.answered = request.node.node_id, time.monotonic()
        site.inbox.run_is_over = partial(self.is_over, request.node)
        site.patience.progress()
        return answer

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        site = self.connection
        site.report("fetching a message")
        began = time.monotonic()
        answer = super().PullObject(request)
        site.contact.meter.transferred("down", len(answer.object_content), time.monotonic() - began)
        return site.size.add(request, site.patience.check(request, answer))

    def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:
        self.connection.report("sending an answer")
        return super().PushMessages(request)

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:
        self.connection.report("sending an answer")
        began = time.monotonic()
        answer = super().PushObject(request)
        self.connection.contact.meter.transferred("up", len(request.object_content), time.monotonic() - began)
        return answer

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:
        try:
            answer = super().SendNodeHeartbeat(request)
            if not answer.success:
                raise httpx.RemoteProtocolError("the server does not know this site's SuperNode")
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:  # then Flower ends the process
                raise
            # Any other error would end Flower's heartbeat alone; this one is retried a little later.
            raise httpx.RemoteProtocolError(str(error)) from error
        self.connection.contact.beat = time.monotonic()
        return answer

    def is_over(self, node: Node, run: int) -> bool:
        """Whether the server reports that this run has ended; without an answer it may still run."""
        try:
            self.GetRun(GetRunRequest(node=node, run_id=run))
        except httpx.HTTPStatusError as error:
            return error.response.status_code == httpx.codes.FORBIDDEN
        except httpx.HTTPError:
            return False
        return False


def use_client_of(kit: Kit, contact: Contact, inbox: Inbox) -> None:
    """Let Flower use the client of this kit."""
    patience, size = Patience(kit.limits.transfer), MessageSize()
    note, clock = Note(kit.meeting, NAME), ClockFile(kit.meeting)
    site = SiteConnection(kit, contact, inbox, note, patience, size, clock)
    inbox.sign_of_life = partial(site.report, "waiting for the executor")
    use_fleet_client(type("KitFleetClient", (SiteFleetClient,), {"connection": site}))
