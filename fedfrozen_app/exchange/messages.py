"""Train requests and their replies as Flower messages.

Messages contain only arrays, JSON texts and numbers: nothing is ever unpickled.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedfrozen_app.core.flower_internals import copy_message
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.flower_records import UNREADABLE, record_of, text_of
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request


@dataclass
class Reply:
    """A client's reply to a train request. With `lacks` or `declined`, nothing was trained."""

    request: str
    examples: int = 0
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    declined: str = ""  # why the client will not take part, as the rest of a sentence
    text: str = ""  # the record as sent, to count its bytes
    anchor: str = ""  # the last digest of a site's audit log
    chosen: list[int] = field(default_factory=list)  # its choice of layers, if the request asks for it
    opens_in: float = 0.0  # seconds until a closed site opens
    pending: "Pending | None" = None  # the source of metrics that are not computed yet

    def settle(self) -> None:
        """Fetch its metrics, which may synchronise with the device."""
        if self.pending is not None:
            self.metrics, self.pending = self.pending.block.metrics_of(self.pending.number), None


class Pending(NamedTuple):
    """A client of a block, whose metrics are still being computed on the device."""

    block: Block
    number: int


def train_content(
    request: TrainRequest,
    arrays: Mapping[str, Tensor],
    *,
    local: bool,
    ticket: Mapping[str, str] | None = None,
) -> RecordDict:
    """The content of a train request's message; `ticket` names the proposal that a site accepted."""
    content = RecordDict()
    content["arrays"] = to_record(arrays, local=local)
    content["order"] = ConfigRecord({"json": request.json})
    if ticket:
        content["ticket"] = ConfigRecord(dict(ticket))
    return content


def ticket_of(message: Message) -> dict[str, str]:
    """The accepted proposal that a request names; empty if it has none."""
    record = message.content.get("ticket")
    return {key: str(value) for key, value in record.items()} if isinstance(record, ConfigRecord) else {}


def train_request_text(message: Message) -> str:
    try:
        return text_of(message, "order", "json")
    except UNREADABLE as error:
        raise ValueError("the message brings none") from error


def train_message(node: int, request: TrainRequest, content: RecordDict, *, ttl: float) -> Message:
    return Message(
        content,
        dst_node_id=node,
        message_type=MessageType.TRAIN,
        ttl=ttl,
        group_id=str(request.round),
    )


def message_to(node: int, message: Message) -> Message:
    """A copy of the message, created now and for this node; the original must not have been sent."""
    return copy_message(message, {"_dst_node_id": node, "_created_at": time.time()})


def read_train(message: Message) -> tuple[TrainRequest, dict[str, Tensor]]:
    """Parse a train request and its arrays."""
    request = read_train_request(str(message.content["order"]["json"]))
    return request, arrays_of(message)


def arrays_of(message: Message) -> dict[str, Tensor]:
    return to_tensors(record_of(message, "arrays", ArrayRecord))


class ReplyRecord(ArrayRecord):
    """A reply within the process, as an object."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply

    def read(self, message: Message) -> Reply:
        return self.reply


class BlockRecord(ArrayRecord):
    """The replies of a block's clients to one request, within the process: they share one object. `numbers`:
    their places in the block, by the id of the answered message."""

    def __init__(self, block: Block, request: str, *, shared: bool) -> None:
        """`request`: the digest of their request; `shared`: whether they send arrays."""
        super().__init__()
        self.block, self.request, self.shared = block, request, shared
        self.text = _reply_text(Reply(request))
        self.numbers: dict[str, int] = {}

    def read(self, message: Message) -> Reply:
        number = self.numbers[message.metadata.reply_to_message_id]
        arrays = self.block.slice(number) if self.shared else {}
        examples, pending = self.block.examples[number], Pending(self.block, number)
        return Reply(self.request, examples, arrays, text=self.text, pending=pending)


def block_replies(
    block: Block, asked: Sequence[Message], requests: Sequence[str], *, shared: bool
) -> list[Message]:
    """The replies of a block's clients to these messages, whose requests have these digests. Replies to the
    same request share their content, which never changes."""
    firsts: dict[str, tuple[BlockRecord, Message]] = {}
    replies = []
    for number, (message, request) in enumerate(zip(asked, requests, strict=True)):
        if request not in firsts:
            record = BlockRecord(block, request, shared=shared)
            content = RecordDict({"arrays": record, "reply": ConfigRecord({"json": record.text})})
            firsts[request] = record, Message(content, reply_to=message)
        record, first = firsts[request]
        question = message.metadata
        record.numbers[question.message_id] = number
        metadata = {"_src_node_id": question.dst_node_id, "_reply_to_message_id": question.message_id}
        replies.append(copy_message(first, metadata))
    return replies


def train_reply(message: Message, reply: Reply, *, local: bool) -> Message:
    content = RecordDict()
    content["arrays"] = to_record(reply.arrays, local=local)
    content["reply"] = ConfigRecord({"json": _reply_text(reply)})
    # Flower's name for the weight, so that its tools understand our replies.
    content["metrics"] = MetricRecord({"num-examples": reply.examples, **reply.metrics})
    return Message(content, reply_to=message)


def reply_bytes(request: TrainRequest) -> int:
    """The text length of a reply without missing arrays."""
    return len(_reply_text(Reply(request.digest)).encode())


def _reply_text(reply: Reply) -> str:
    record: dict[str, Any] = {"order": reply.request, "lacks": reply.lacks}
    if reply.declined:
        record["declined"] = reply.declined
    if reply.anchor:
        record["anchor"] = reply.anchor
    if reply.chosen:
        record["chosen"] = reply.chosen
    if reply.opens_in:
        record["opens_in"] = reply.opens_in
    return json.dumps(record, separators=(",", ":"))


def read_reply(message: Message) -> Reply:
    """Parse a reply; `ValueError` with a reason if it is invalid."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    if message.has_content() and isinstance(
        local := message.content.get("arrays"), BlockRecord | ReplyRecord
    ):
        return local.read(message)
    try:
        text = str(record_of(message, "reply", ConfigRecord)["json"])
        data = json.loads(text)
        numbers = record_of(message, "metrics", MetricRecord)
        record = record_of(message, "arrays", ArrayRecord)
        # A list is not a metric: float() raises the TypeError handled below.
        metrics = {key: float(value) for key, value in numbers.items()}  # type: ignore[arg-type]
        reply = Reply(
            request=data["order"],
            examples=int(metrics.pop("num-examples")),
            metrics=metrics,
            lacks=[str(name) for name in data["lacks"]],
            declined=str(data.get("declined", "")),
            text=text,
            anchor=str(data.get("anchor", "")),
            chosen=[int(layer) for layer in data.get("chosen", [])],
            opens_in=float(data.get("opens_in", 0.0)),
        )
        if not 0 <= reply.opens_in < math.inf:
            raise ValueError("it opens at no time")
    except UNREADABLE as error:
        raise ValueError(f"sent no readable reply ({type(error).__name__}: {error})") from error
    reply.arrays = to_tensors(record)
    return reply
