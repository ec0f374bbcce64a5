"""Serves the metrics at http://127.0.0.1:PORT/metrics, for a Prometheus on this machine."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.monitoring.families import Collected

HOST = "127.0.0.1"
PATH = "/metrics"


class Source(Protocol):
    def collect(self) -> Collected:
        """The current metrics; `UserError` if none may be shown or can be read."""


class Scrape(Collector):
    """One scrape, formatted by Prometheus's library."""

    def __init__(self, collected: Collected) -> None:
        self._collected = collected

    def collect(self):  # type: ignore[no-untyped-def]  # as the library declares it
        return self._collected.metrics()


def scrape(source: Source, accept: str = "") -> tuple[bytes, str]:
    """(metrics, content type): OpenMetrics if the client accepts it, else Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(source.collect()))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


def make_endpoint(source: Source, port: int) -> ThreadingHTTPServer:
    class Handler(_Handler):
        answer_of = staticmethod(lambda accept: scrape(source, accept))

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Port {port} cannot be used ({error}): give another with --port; 0 takes any that is free."
        ) from error


class _Handler(BaseHTTPRequestHandler):
    answer_of: Callable[[str], tuple[bytes, str]]
    timeout = 10  # seconds for a request: an endless one would hold a thread

    def do_GET(self) -> None:
        try:
            path, host = urlsplit(self.path).path, urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:  # a bracket that is not closed
            return self._send(HTTPStatus.BAD_REQUEST, b"The address cannot be read.\n")
        if host not in (HOST, "localhost"):  # against DNS rebinding
            return self._send(HTTPStatus.FORBIDDEN, f"Ask for {HOST} by that name.\n".encode())
        if path != PATH:
            return self._send(HTTPStatus.NOT_FOUND, f"The numbers are at {PATH}.\n".encode())
        try:
            content, kind = self.answer_of(self.headers.get("Accept", ""))
        except UserError as error:  # Prometheus then counts this target as down
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="backslashreplace"))
        return self._send(HTTPStatus.OK, content, kind)

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line per request would fill the log."""
