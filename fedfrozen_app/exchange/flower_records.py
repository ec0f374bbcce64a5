"""Read records of a Flower message, with type checks."""

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
LONGEST_NAME = 100  # a client's name is shown in tables, charts and log lines
# Exceptions from reading invalid JSON texts and records.
UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


def text_of(message: Message, key: str, name: str) -> str:
    value = record_of(message, key, ConfigRecord)[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} of {key} is no text")
    return value


def record_of(message: Message, key: str, kind: type[R]) -> R:
    """A record of a message. Reads by item, not through `content.array_records`: that view leaves a reference
    cycle, which keeps the message's whole model in memory until the next garbage collection."""
    record = message.content[key]
    if not isinstance(record, kind):
        raise TypeError(f"{key} is no {kind.__name__}")
    return record
