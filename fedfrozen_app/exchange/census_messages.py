"""The messages of a census: the request, and a node's counts."""

from dataclasses import asdict, dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfrozen_app.exchange.flower_records import LONGEST_NAME, UNREADABLE, text_of
from fedfrozen_app.exchange.hello_messages import REFUSED, WAITING

CENSUS = f"{MessageType.QUERY}.census"


@dataclass(frozen=True)
class CensusReply:
    """A node's answer to a census: its counts as JSON, or that it waits for approval, or refused."""

    name: str
    state: str = ""
    json: str = ""
    anchor: str = ""


def census_message(node: int, ask: str, ttl: float) -> Message:
    return Message(RecordDict({"census": ConfigRecord({"ask": ask})}), node, CENSUS, ttl=ttl)


def census_text(message: Message) -> str:
    """The text of the request; `ValueError` if the message has none."""
    try:
        return text_of(message, "census", "ask")
    except UNREADABLE as error:
        raise ValueError("the message brings no census") from error


def census_reply(message: Message, reply: CensusReply) -> Message:
    return Message(RecordDict({"census": ConfigRecord(asdict(reply))}), reply_to=message)


def read_census(message: Message) -> CensusReply:
    """Parse an answer; `ValueError` with a reason if the message is not one."""
    if message.has_error():
        raise ValueError(f"failed: {message.error.reason or 'no reason given'}")
    try:
        found = CensusReply(
            **{key: text_of(message, "census", key) for key in ("name", "state", "json", "anchor")}
        )
    except UNREADABLE as error:
        raise ValueError(f"sent no readable answer ({type(error).__name__}: {error})") from error
    if not (0 < len(found.name) <= LONGEST_NAME and found.name.isprintable()):
        raise ValueError(f"sent an answer whose name is no line of 1 to {LONGEST_NAME} characters")
    if found.state not in ("", WAITING, REFUSED):
        raise ValueError("sent an answer in a state that is none")
    return found
