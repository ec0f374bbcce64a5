"""Counted nouns, for sentences; and keys with dots, for settings within settings."""

from collections.abc import Mapping
from typing import Any


def told(error: BaseException) -> str:
    """An error in one line: its kind, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def counted(number: int, noun: str) -> str:
    """ "1 client", "3 clients"; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
