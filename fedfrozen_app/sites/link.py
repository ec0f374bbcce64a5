"""The connection between SuperNode and executor of a site: a Unix socket that only the kit's owner can reach.

No port is opened. Another process that took the socket first would be refused: both sides show the
certificate of the kit's own `link.pem`, made at the first start and known to no other party.
"""

import datetime
import fcntl
import os
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.app import Message

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    ObjectPullError,
    ProtobufClientInterceptor,
    PullObjectRequest,
    PullObjectResponse,
    RuntimeHttpClient,
    replace_http_client,
)
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link_meter import LinkMeter

NAME = "supernode"  # of the socket, and in the certificate that a client checks
# Routes that Flower's SuperNode does not have:
CONTACT = "/contact"  # returns a Contact
BEGIN = "/begin"  # a new executor has started
NEVER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)  # no expiry (RFC 5280); the file can be deleted


@dataclass
class Contact:
    """When the server last answered this SuperNode."""

    node: int | None = None  # its node id at the server; None: not admitted yet
    answered: float | None = None  # when the server last answered a request for messages (monotonic clock)
    beat: float | None = None  # when the server last took its heartbeat; without one it counts as gone
    meter: LinkMeter = field(default_factory=LinkMeter, compare=False)
    # The measurements of another process's meter, as it reported them.
    link: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """For the API; `answered` has an older name there."""
        return {
            "node": self.node,
            "heard": self.answered,
            "beat": self.beat,
            "link": self.meter.to_json(),
        }

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Contact":
        return cls(found["node"], found["heard"], found["beat"], link=found.get("link", {}))


class SuperNodeClient(RuntimeHttpClient):
    """Flower's client of the SuperNode, over the kit's socket."""

    def __init__(self, kit: Kit, interceptors: Sequence[ProtobufClientInterceptor] = ()) -> None:
        # Flower's own HTTP client supports only ports: it is replaced before it is used.
        super().__init__(f"https://{NAME}", interceptors=interceptors, verify=False)
        self._folder = open_folder(kit.meeting)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(verify=context(kit, server=False), uds=short(self._folder, NAME)),
            timeout=30,
            trust_env=False,  # a proxy in the environment must not get these requests
        )
        replace_http_client(self, self._http)

    def contact(self, timeout: float) -> Contact:
        """The SuperNode's contact with its server."""
        answer = self._http.get(f"https://{NAME}{CONTACT}", timeout=timeout)
        answer.raise_for_status()
        return Contact.read(answer.json())

    def begin(self) -> None:
        """Report a new executor: the work of an earlier one is lost, and the server need not wait for it."""
        self._http.post(f"https://{NAME}{BEGIN}").raise_for_status()

    def close(self) -> None:
        super().close()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


class Patience:
    """Gives up on a message of which no piece has arrived for too long; Flower itself would retry for hours.

    A piece is requested repeatedly until it is there, so that no single request hangs.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._last = limit, time.monotonic()

    def check(self, piece: PullObjectRequest, answer: PullObjectResponse) -> PullObjectResponse:
        if answer.object_available:
            self.progress()
        elif time.monotonic() - self._last > self._limit:
            raise ObjectPullError(piece.object_id, f"no piece of its message came for {self._limit:g} s")
        return answer

    def progress(self) -> None:
        self._last = time.monotonic()


def is_stranger(error: BaseException | None) -> bool:
    """Whether a connection failed because the other side could not prove that it belongs to this kit."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def listening(meeting: Path, who: str) -> Iterator[socket.socket]:
    """The bound socket of the one process of this name that may listen in the folder."""
    folder = open_folder(meeting)
    try:
        with only_one(meeting / f"{who}.lock", f"A {who} of {meeting.parent} is running already"):
            path = short(folder, who)
            try:
                Path(path).unlink(missing_ok=True)  # of a process that was killed: this one holds the lock
            except OSError as error:
                raise UserError(
                    f"{meeting}/{who}.sock is no socket ({error.strerror}): remove it."
                ) from error
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
                bound.bind(path)
                yield bound
    finally:
        os.close(folder)


@contextmanager
def only_one(path: Path, already: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{already}: end it first.") from error
        yield


def running(lock: Path) -> bool:
    """Whether a process holds this lock."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def open_folder(folder: Path) -> int:
    """A descriptor of the meeting folder; `UserError` if anyone but its owner can enter it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"{folder} cannot be entered ({error.strerror}): it must be a folder.") from error
    found = os.fstat(number)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(number)
        raise UserError(f"Others can enter {folder}: remove it, and start as the owner of the kit.")
    return number


def short(folder: int, who: str) -> str:
    """The socket's path by its folder's descriptor: a socket's path is limited to 107 bytes."""
    return f"/proc/self/fd/{folder}/{who}.sock"


def context(kit: Kit, *, server: bool) -> ssl.SSLContext:
    """TLS in which both sides show, and accept, only the kit's own certificate."""
    own = credentials(kit)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(own)
    made.load_verify_locations(own)
    return made


def credentials(kit: Kit) -> Path:
    """`link.pem`, key and certificate; made by the process of the site that starts first."""
    path = kit.folder / "link.pem"
    if path.exists():
        return path
    with tempfile.NamedTemporaryFile(dir=kit.folder, prefix=".link.") as file:  # readable by its owner only
        file.write(_make_credentials())
        file.flush()
        with suppress(FileExistsError):  # unlike a rename, it never replaces the file of the other process
            os.link(file.name, path)
    return path


def _make_credentials() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfrozen site link")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))
        .not_valid_after(NEVER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def in_time_of(message: Message, reply: Message) -> None:
    """Date the reply by the sender's clock: Flower drops replies from a machine whose clock is ahead."""
    reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
