"""The conversations between server and client, as Flower messages: hello, train, and census.

Only arrays, JSON texts and numbers travel: nothing is ever unpickled.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from torch import Tensor

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.order import Order, read_order

LONGEST_NAME = 100  # a client's; it stands in tables, figures and log lines
WAITING, REFUSED = "waiting", "refused"  # states of a site that does not take part
MASKED_BY = "masking"  # the action of Flower's messages for the steps of a masked round
MASKING = f"{MessageType.QUERY}.{MASKED_BY}"
ALIVE = f"{MessageType.QUERY}.alive"
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
# What JSON texts and records that are not ours end in, however they are made.
UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Hello:
    """Who a node is: its client name (a partition number or a site), and what it holds already."""

    name: str
    num_partitions: int | None = None
    held: list[str] = field(default_factory=list)
    state: str = ""  # of a site that does not take part: it waits for a person's approval, or refused
    anchor: str = ""  # the last digest of a site's audit log


@dataclass
class Reply:
    """A client's answer to an order. With `lacks` or `declined`, nothing was trained."""

    order: str
    examples: int = 0
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    declined: str = ""  # why the client will not take part, as the rest of a sentence
    text: str = ""  # the record as it travelled, for counting
    anchor: str = ""  # the last digest of a site's audit log
    chosen: list[int] = field(default_factory=list)  # the layers that it would take, where it was asked
    pending: "Pending | None" = None  # where its metrics are still to come from

    def settle(self) -> None:
        """Have its metrics; the device may have to be waited for."""
        if self.pending is not None:
            self.metrics, self.pending = self.pending.block.figures_of(self.pending.number), None


class Pending(NamedTuple):
    """A client of a block, whose figures are on the device until somebody waits for them."""

    block: Block
    number: int


def hello_message(node: int, card: Mapping[str, Any], ttl: float, proposal: str = "") -> Message:
    """`card` says how this run reads its data: class order, normalisation, sizes.

    `proposal` is what a site with an executor is asked for; other nodes do not look at it.
    """
    content = RecordDict({"hello": ConfigRecord({"card": json.dumps(dict(card)), "proposal": proposal})})
    return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)


def alive_message(node: int, ttl: float) -> Message:
    """A question that says nothing, and whose answer says nothing but that somebody is there."""
    return Message(RecordDict(), dst_node_id=node, message_type=ALIVE, ttl=ttl)


def alive_reply(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def proposal_text(message: Message) -> str:
    """`ValueError` where the hello brings none."""
    try:
        return _text(message, "hello", "proposal")
    except UNREADABLE as error:
        raise ValueError("the hello brings no proposal") from error


def hello_reply(message: Message, hello: Hello) -> Message:
    record = ConfigRecord({"json": json.dumps(asdict(hello))})
    return Message(RecordDict({"hello": record}), reply_to=message)


def read_hello(message: Message) -> Hello:
    """`ValueError` with a reason when the message is no hello of ours."""
    try:
        data = json.loads(str(_record(message, "hello", ConfigRecord)["json"]))
        name, parts, held = data["name"], data["num_partitions"], data["held"]
        state, anchor = data.get("state", ""), data.get("anchor", "")
    except UNREADABLE as error:
        raise ValueError(f"sent no readable hello ({type(error).__name__}: {error})") from error
    if not isinstance(name, str) or not (parts is None or type(parts) is int):
        raise ValueError("sent a hello without a name, or with partitions that are no number")
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"sent a hello whose name is no line of 1 to {LONGEST_NAME} characters")
    if not isinstance(held, list) or not all(isinstance(digest, str) for digest in held):
        raise ValueError("sent a hello in which what it holds is no list of digests")
    if state not in ("", WAITING, REFUSED) or not isinstance(anchor, str):
        raise ValueError("sent a hello in a state that is none")
    return Hello(name, parts, held, state, anchor)


def train_content(
    order: Order, arrays: Mapping[str, Tensor], *, local: bool, ticket: Mapping[str, str] | None = None
) -> RecordDict:
    """What an order's message holds; `ticket` tells a site to which accepted proposal it belongs."""
    content = RecordDict()
    content["arrays"] = to_record(arrays, local=local)
    content["order"] = ConfigRecord({"json": order.json})
    if ticket:
        content["ticket"] = ConfigRecord(dict(ticket))
    return content


def with_envelopes(content: RecordDict, text: str) -> RecordDict:
    """The same content, and what other clients have sealed for this one."""
    return RecordDict({**dict(content.items()), "envelopes": ConfigRecord({"json": text})})


def envelopes_of(message: Message) -> str:
    """Empty where the order brings none."""
    record = message.content.get("envelopes")
    return str(record["json"]) if isinstance(record, ConfigRecord) and "json" in record else ""


def masking_message(
    node: int, server_round: int, text: str, *, ttl: float, ticket: Mapping[str, str] | None = None
) -> Message:
    """A step of a masked round that carries no array."""
    content = RecordDict({"masking": ConfigRecord({"json": text})})
    if ticket:
        content["ticket"] = ConfigRecord(dict(ticket))
    return Message(content, dst_node_id=node, message_type=MASKING, ttl=ttl, group_id=str(server_round))


def masking_reply(message: Message, text: str) -> Message:
    return Message(RecordDict({"masking": ConfigRecord({"json": text})}), reply_to=message)


def masking_text(message: Message) -> str:
    """`ValueError` with a reason where it brings none."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    try:
        return _text(message, "masking", "json")
    except UNREADABLE as error:
        raise ValueError("sent no readable answer") from error


def ticket_of(message: Message) -> dict[str, str]:
    """Empty where the order has none."""
    record = message.content.get("ticket")
    return {key: str(value) for key, value in record.items()} if isinstance(record, ConfigRecord) else {}


def order_text(message: Message) -> str:
    try:
        return _text(message, "order", "json")
    except UNREADABLE as error:
        raise ValueError("the message brings none") from error


def train_message(node: int, order: Order, content: RecordDict, *, ttl: float) -> Message:
    return Message(
        content,
        dst_node_id=node,
        message_type=MessageType.TRAIN,
        ttl=ttl,
        group_id=str(order.round),
    )


def message_to(node: int, message: Message) -> Message:
    """The same message, made now and for this node; that one must not have been sent."""
    return _like(message, {"_dst_node_id": node, "_created_at": time.time()})


def _like(message: Message, told: Mapping[str, Any]) -> Message:
    """The same message, but for what its metadata tell. Flower looks at every argument of a new one: for the
    clients of a round that takes longer than all else in sending them their orders."""
    metadata, other = object.__new__(Metadata), object.__new__(Message)
    metadata.__dict__.update(message.metadata.__dict__)
    metadata.__dict__.update(told)
    other.__dict__.update(message.__dict__)
    other.__dict__["_metadata"] = metadata
    return other


def read_train(message: Message) -> tuple[Order, dict[str, Tensor]]:
    """The order and the arrays that came with it."""
    order = read_order(str(message.content["order"]["json"]))
    return order, to_tensors(_record(message, "arrays", ArrayRecord))


class BlockRecord(ArrayRecord):
    """What the clients of a block answer to one order, on its way within the process: nothing is made for
    each of them. `numbers` are their places in the block, by the message that each of them answers."""

    def __init__(self, block: Block, order: str, *, shared: bool) -> None:
        """`order` is the digest of theirs; `shared`: whether they send arrays."""
        super().__init__()
        self.block, self.order, self.shared = block, order, shared
        self.text = _reply_text(Reply(order))
        self.numbers: dict[str, int] = {}

    def read(self, message: Message) -> Reply:
        number = self.numbers[message.metadata.reply_to_message_id]
        arrays = self.block.slice(number) if self.shared else {}
        examples, pending = self.block.examples[number], Pending(self.block, number)
        return Reply(self.order, examples, arrays, text=self.text, pending=pending)


def block_replies(
    block: Block, asked: Sequence[Message], orders: Sequence[str], *, shared: bool
) -> list[Message]:
    """The replies of a block's clients to these messages, whose orders have these digests. Those with the
    same order have the same content: nobody changes a message's."""
    firsts: dict[str, tuple[BlockRecord, Message]] = {}
    replies = []
    for number, (message, order) in enumerate(zip(asked, orders, strict=True)):
        if order not in firsts:
            record = BlockRecord(block, order, shared=shared)
            content = RecordDict({"arrays": record, "reply": ConfigRecord({"json": record.text})})
            firsts[order] = record, Message(content, reply_to=message)
        record, first = firsts[order]
        question = message.metadata
        record.numbers[question.message_id] = number
        told = {"_src_node_id": question.dst_node_id, "_reply_to_message_id": question.message_id}
        replies.append(_like(first, told))
    return replies


def train_reply(message: Message, reply: Reply, *, local: bool) -> Message:
    content = RecordDict()
    content["arrays"] = to_record(reply.arrays, local=local)
    content["reply"] = ConfigRecord({"json": _reply_text(reply)})
    # Flower's own name for the weight, so that its tools understand our replies.
    content["metrics"] = MetricRecord({"num-examples": reply.examples, **reply.metrics})
    return Message(content, reply_to=message)


def _reply_text(reply: Reply) -> str:
    record: dict[str, Any] = {"order": reply.order, "lacks": reply.lacks}
    if reply.declined:
        record["declined"] = reply.declined
    if reply.anchor:
        record["anchor"] = reply.anchor
    if reply.chosen:
        record["chosen"] = reply.chosen
    return json.dumps(record, separators=(",", ":"))


def read_reply(message: Message) -> Reply:
    """`ValueError` with a reason when the message is not a reply of ours."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    if message.has_content() and isinstance(together := message.content.get("arrays"), BlockRecord):
        return together.read(message)
    try:
        text = str(_record(message, "reply", ConfigRecord)["json"])
        data = json.loads(text)
        numbers = _record(message, "metrics", MetricRecord)
        record = _record(message, "arrays", ArrayRecord)
        # A list is no figure of ours: float() refuses it with the TypeError below.
        metrics = {key: float(value) for key, value in numbers.items()}  # type: ignore[arg-type]
        reply = Reply(
            order=data["order"],
            examples=int(metrics.pop("num-examples")),
            metrics=metrics,
            lacks=[str(name) for name in data["lacks"]],
            declined=str(data.get("declined", "")),
            text=text,
            anchor=str(data.get("anchor", "")),
            chosen=[int(layer) for layer in data.get("chosen", [])],
        )
    except UNREADABLE as error:
        raise ValueError(f"sent no readable reply ({type(error).__name__}: {error})") from error
    reply.arrays = to_tensors(record)
    return reply


CENSUS = f"{MessageType.QUERY}.census"


@dataclass(frozen=True)
class CensusReply:
    """A node's answer to a census: what it tells, as JSON; or that it waits for a person, or refused."""

    name: str
    state: str = ""
    json: str = ""
    anchor: str = ""


def census_message(node: int, ask: str, ttl: float) -> Message:
    return Message(RecordDict({"census": ConfigRecord({"ask": ask})}), node, CENSUS, ttl=ttl)


def census_text(message: Message) -> str:
    """What is asked; `ValueError` where the message does not say."""
    try:
        return _text(message, "census", "ask")
    except UNREADABLE as error:
        raise ValueError("the message brings no census") from error


def census_reply(message: Message, reply: CensusReply) -> Message:
    return Message(RecordDict({"census": ConfigRecord(asdict(reply))}), reply_to=message)


def read_census(message: Message) -> CensusReply:
    """`ValueError` with a reason when the message is no answer of ours."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    try:
        found = CensusReply(
            **{key: _text(message, "census", key) for key in ("name", "state", "json", "anchor")}
        )
    except UNREADABLE as error:
        raise ValueError(f"sent no readable answer ({type(error).__name__}: {error})") from error
    if not (0 < len(found.name) <= LONGEST_NAME and found.name.isprintable()):
        raise ValueError(f"sent an answer whose name is no line of 1 to {LONGEST_NAME} characters")
    if found.state not in ("", WAITING, REFUSED):
        raise ValueError("sent an answer in a state that is none")
    return found


def _text(message: Message, key: str, name: str) -> str:
    value = _record(message, key, ConfigRecord)[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} of {key} is no text")
    return value


def _record(message: Message, key: str, kind: type[R]) -> R:
    """By item, not through `content.array_records`: that view leaves a reference cycle behind, and with it a
    message's whole model in memory until the garbage collector comes by."""
    record = message.content[key]
    if not isinstance(record, kind):
        raise TypeError(f"{key} is no {kind.__name__}")
    return record
