"""A site's processes under test: kits, a SuperNode, and waiting for something to happen."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from fedfrozen_app.sites import link
from fedfrozen_app.sites.inbox import InboxFactory
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.supernode import executor_api

PLAN = {
    "server": {"address": "fed.example.org", "port": 8443, "names": ["10.1.2.3"]},
    "sites": ["north", "south"],
}


def wait_until(condition, patience: float = 30) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kit_in(folder) -> Kit:
    """What of a kit this is about; deep down, where a socket's path would be too long."""
    deep = folder / ("d" * 100)
    deep.mkdir(mode=0o700, parents=True)
    (deep / "site.yaml").write_text(
        "{name: north, superlink: 'x:1', views: {main: {kind: digits}}, folder: var, model_path: null}"
    )
    return Kit.read(deep)


@contextmanager
def supernode(kit, contact=None, states=None):
    """The API of a SuperNode, as `fedfrozen site node` serves it."""
    with link.listening(kit.meeting, link.NAME) as bound:
        app = executor_api(states or InboxFactory(), contact or link.Contact())
        config = uvicorn.Config(app, loop="asyncio", log_level="warning")
        config.load()
        config.ssl = link.context(kit, server=True)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()
