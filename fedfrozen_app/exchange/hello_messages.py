"""Hello messages: a node's identity, and the run proposed to a site."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfrozen_app.exchange.flower_records import LONGEST_NAME, UNREADABLE, record_of, text_of

WAITING, REFUSED = "waiting", "refused"  # states of a site that does not take part
ALIVE = f"{MessageType.QUERY}.alive"
SITE_KEYS = {"name", "held", "state", "anchor"}  # of a site's hello
SIMULATION_KEYS = {"num_partitions"}  # of a simulated node's hello; older sites send null


@dataclass(frozen=True)
class Hello:
    """A node's answer: its client name (a partition number or a site), and the digests that it holds. Only
    simulated nodes have `num_partitions`."""

    name: str
    num_partitions: int | None = None
    held: list[str] = field(default_factory=list)
    state: str = ""  # of a site that does not take part: WAITING or REFUSED
    anchor: str = ""  # the last digest of a site's audit log


def hello_message(node: int, data_spec: Mapping[str, Any], ttl: float, proposal: str = "") -> Message:
    """A hello to a node. `data_spec`: the run's data format (order of classes, normalisation, sizes).

    `proposal` is for sites with an executor; other nodes ignore it.
    """
    content = RecordDict({"hello": ConfigRecord({"card": json.dumps(dict(data_spec)), "proposal": proposal})})
    return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)


def hello_reply(message: Message, hello: Hello) -> Message:
    record = ConfigRecord({"json": json.dumps(asdict(hello))})
    return Message(RecordDict({"hello": record}), reply_to=message)


def read_hello(message: Message, *, site: bool = False) -> Hello:
    """Parse a hello; `ValueError` with a reason if it is invalid. `site`: it must be that of a site."""
    try:
        data = json.loads(str(record_of(message, "hello", ConfigRecord)["json"]))
        name, parts, held = data["name"], data.get("num_partitions"), data["held"]
        state, anchor = data.get("state", ""), data.get("anchor", "")
        given = {key for key, value in data.items() if key not in SIMULATION_KEYS or value is not None}
    except UNREADABLE as error:
        raise ValueError(f"sent no readable hello ({type(error).__name__}: {error})") from error
    if site and (strange := sorted(given - SITE_KEYS)):
        what = strange[0] if strange[0] in SIMULATION_KEYS else "a key"
        raise ValueError(f"sent a hello with {what}, which a site's hello does not have")
    if not isinstance(name, str) or not (parts is None or type(parts) is int):
        raise ValueError("sent a hello without a name, or with partitions that are no number")
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"sent a hello whose name is no line of 1 to {LONGEST_NAME} characters")
    if not isinstance(held, list) or not all(isinstance(digest, str) for digest in held):
        raise ValueError("sent a hello in which what it holds is no list of digests")
    if state not in ("", WAITING, REFUSED) or not isinstance(anchor, str):
        raise ValueError("sent a hello in a state that is none")
    return Hello(name, parts, held, state, anchor)


def proposal_text(message: Message) -> str:
    """The proposal's text; `ValueError` if the hello has none."""
    try:
        return text_of(message, "hello", "proposal")
    except UNREADABLE as error:
        raise ValueError("the hello brings no proposal") from error


def alive_message(node: int, ttl: float) -> Message:
    """An empty message, whose empty answer shows that the node is alive."""
    return Message(RecordDict(), dst_node_id=node, message_type=ALIVE, ttl=ttl)


def alive_reply(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)
