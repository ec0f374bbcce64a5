"""The messages of a survival study: the request and one step of it. A site answers as in a census."""

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfrozen_app.exchange.flower_records import UNREADABLE, text_of

STUDY = f"{MessageType.QUERY}.survival"


def study_message(node: int, ask: str, step: str, ttl: float) -> Message:
    return Message(RecordDict({"study": ConfigRecord({"ask": ask, "step": step})}), node, STUDY, ttl=ttl)


def study_texts(message: Message) -> tuple[str, str]:
    """(request, step); `ValueError` if the message has none."""
    try:
        return text_of(message, "study", "ask"), text_of(message, "study", "step")
    except UNREADABLE as error:
        raise ValueError("the message brings no survival study") from error
