"""Every message of a run and every array that a client keeps, written down as bytes.

Within a test they are watched by `watch`. For Flower's simulation, whose apps live in other processes, a test
bundles this file as an app of its own, whose `server` and `client` are ours, watched.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import ServerApp

from fedfrozen_app import client_app, server_app
from fedfrozen_app.core.digests import raw_bytes
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.exchange.messages import BlockRecord
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.local.client_state import keep_private
from fedfrozen_app.runtimes.inprocess import cohort_grid as grids
from fedfrozen_app.server.transport import Transport

PROJECT = """
[project]
name = "watched"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "watched"
fab-include = ["watched.py"]

[tool.flwr.app.components]
serverapp = "watched:server"
clientapp = "watched:client"

[tool.flwr.app.config]
overrides = ""
server-overrides = ""
output-dir = ""
"""


def write_message(folder: Path, message: Message) -> None:
    """The names of its arrays, and all that it holds as it would travel."""
    if message.has_error():
        names, payload = [], str(message.error).encode()
    else:
        payload = recorddict_to_proto(message.content).SerializeToString()
        record = message.content.get("arrays", ArrayRecord())
        # A client's part of a block has no bytes yet.
        arrays = record.read(message).arrays if isinstance(record, BlockRecord) else {}
        payload += b"".join(raw_bytes(value) for value in arrays.values())
        names = [*to_tensors(record), *arrays]
    write(folder / "messages", {"type": message.metadata.message_type, "names": names}, payload)


def write(folder: Path, about: Any, payload: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex  # several processes write here
    (folder / f"{name}.bin").write_bytes(payload)
    (folder / f"{name}.json").write_text(json.dumps(about))


def read_all(folder: Path) -> list[tuple[Any, bytes]]:
    found = sorted(folder.glob("*.json"))
    return [(json.loads(path.read_text()), path.with_suffix(".bin").read_bytes()) for path in found]


def watch(folder: Path, replace: Callable[[Any, str, Any], None]) -> None:
    """`replace(object, name, value)`: `setattr`, or a test's monkeypatch."""
    send, receive = Transport.send, Transport.receive

    def watched_send(transport, messages):
        for message in messages:
            write_message(folder, message)
        return send(transport, messages)

    def watched_receive(transport, message_id, deadline):
        message = receive(transport, message_id, deadline)
        if message is not None:
            write_message(folder, message)
        return message

    replace(Transport, "send", watched_send)
    replace(Transport, "receive", watched_receive)
    watch_keeping(folder, replace)


def watch_keeping(folder: Path, replace: Callable[[Any, str, Any], None]) -> None:
    def watched_keep(context, arrays, *, local):
        for name, value in arrays.items():
            write(folder / "kept", name, raw_bytes(value))
        keep_private(context, arrays, local=local)

    for module in (train_handler, grids):
        replace(module, "keep_private", watched_keep)


client = ClientApp()
server = ServerApp()


@client.query()
def hello(message, context):
    return client_app.hello(message, context)


@client.train()
def train(message, context):
    watch_keeping(Path(str(context.run_config["output-dir"])), setattr)
    return client_app.train(message, context)


@server.main()
def main(grid, context):
    watch(Path(str(context.run_config["output-dir"])), setattr)
    server_app.main(grid, context)
