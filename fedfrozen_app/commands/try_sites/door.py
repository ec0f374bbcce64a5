"""A substitute for nginx where it is not installed: TLS on 127.0.0.1, only for a trial on one machine.

Like nginx, it requires a certificate of the federation's authority that the server has admitted. It does not
parse requests: it does not keep sites from the operators' API, and has no rate limit.
"""

import asyncio
import contextlib
import os
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fedfrozen_app.core.certificates import serial
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites import link
from fedfrozen_app.sites.admitted import admitted

LEFT_OUT = (
    "nginx is not installed. In its place this command opens a small door of its own, on 127.0.0.1 alone. "
    "Left out: sites are not kept from the operators' part of the server, and nobody's requests are limited. "
    "A real server needs nginx (apt install nginx)."
)
PIECE = 65536  # bytes
START = 10.0  # seconds


class Door:
    """Forwards TLS connections to the SuperLink's socket, in its own thread."""

    def __init__(self, kit: Path, port: int, internal_port: int) -> None:
        self._kit = kit
        self._ports = {port: self._context(guests=True), internal_port: self._context(guests=False)}
        self._ready = threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._folder = link.open_folder(self._kit / "run")
        self._thread.start()
        self._ready.wait(START)
        if self._problem is not None:
            raise UserError(f"The server's port cannot be opened ({self._problem.strerror}): try again.")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(START)
        os.close(self._folder)

    def _context(self, *, guests: bool) -> ssl.SSLContext:
        """TLS settings. `guests` must present a certificate; the server's own processes need none, only
        Flower's secret."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self._kit / "server.crt", self._kit / "server.key")
        if guests:
            made.verify_mode = ssl.CERT_REQUIRED
            made.load_verify_locations(self._kit / "ca.crt")
        return made

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        servers: Sequence[asyncio.Server] = ()
        try:
            servers = [
                await asyncio.start_server(self._connected, "127.0.0.1", port, ssl=context)
                for port, context in self._ports.items()
            ]
        except OSError as error:
            self._problem = error
            return
        finally:
            self._ready.set()
        await self._over.wait()
        for server in servers:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self._is_admitted(writer.get_extra_info("ssl_object")):
                return
            with contextlib.suppress(OSError):  # one side has closed
                place = link.short(self._folder, "superlink")
                behind, onward = await asyncio.open_unix_connection(place)
                try:
                    ways = (self._pass(reader, onward), self._pass(behind, writer))
                    await asyncio.gather(*ways, return_exceptions=True)
                finally:
                    onward.close()
        finally:
            writer.close()

    def _is_admitted(self, tls: ssl.SSLObject) -> bool:
        if tls.context.verify_mode != ssl.CERT_REQUIRED:
            return True
        shown = (tls.getpeercert() or {}).get("serialNumber")
        return shown in {serial(certificate) for certificate in admitted(self._kit).values()}

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(PIECE):
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()
