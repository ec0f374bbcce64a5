"""The messages of a masked round without arrays, and the shares that are sent with its train request."""

from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfrozen_app.exchange.flower_records import UNREADABLE, text_of

MASKED_BY = "masking"  # the action of Flower's messages for the steps of a masked round
MASKING = f"{MessageType.QUERY}.{MASKED_BY}"


def masking_message(
    node: int, server_round: int, text: str, *, ttl: float, ticket: Mapping[str, str] | None = None
) -> Message:
    """A message for a step of a masked round without arrays."""
    content = RecordDict({"masking": ConfigRecord({"json": text})})
    if ticket:
        content["ticket"] = ConfigRecord(dict(ticket))
    return Message(content, dst_node_id=node, message_type=MASKING, ttl=ttl, group_id=str(server_round))


def masking_reply(message: Message, text: str) -> Message:
    return Message(RecordDict({"masking": ConfigRecord({"json": text})}), reply_to=message)


def masking_text(message: Message) -> str:
    """The text of the message; `ValueError` with a reason if it has none."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    try:
        return text_of(message, "masking", "json")
    except UNREADABLE as error:
        raise ValueError("sent no readable answer") from error


def with_envelopes(content: RecordDict, text: str) -> RecordDict:
    """The same content with the shares that other clients have encrypted for this one."""
    return RecordDict({**dict(content.items()), "envelopes": ConfigRecord({"json": text})})


def envelopes_of(message: Message) -> str:
    """The encrypted shares in a request; empty if there are none."""
    record = message.content.get("envelopes")
    return str(record["json"]) if isinstance(record, ConfigRecord) and "json" in record else ""
