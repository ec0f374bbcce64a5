"""Flower's Control API over the SuperLink's socket, for the owner of the server's folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from fedfrozen_app.core.flower_internals import ControlHttpClient, replace_http_client
from fedfrozen_app.sites.link import open_folder, short

SOCKET = "superlink"


@contextmanager
def control(folder: Path, timeout: float = 30.0) -> Iterator[ControlHttpClient]:
    """A client that is closed at the end of the `with` block."""
    number = open_folder(folder / "run")
    try:
        client = ControlHttpClient("http://superlink", verify=False)
        transport = httpx.HTTPTransport(uds=short(number, SOCKET))
        replace_http_client(client, httpx.Client(transport=transport, timeout=timeout, trust_env=False))
        with client:
            yield client
    finally:
        os.close(number)
