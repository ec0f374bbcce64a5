"""Format counted nouns, errors and commands; escape untrusted texts; flatten keys."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def format_error(error: BaseException) -> str:
    """An error in one line: its kind, and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def printable(text: str) -> str:
    """An untrusted text as one line: characters that control a terminal, a log or a page are escaped.

    Python prints neither control characters nor those that format (ANSI's escape, line ends, right-to-left
    marks, zero widths), nor halves of surrogate pairs.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines: line ends are kept."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def quoted(text: str, most: int = 400) -> str:
    """Another party's text for a terminal, a log or a page: `printable`, at most `most` characters."""
    if len(text) > most:
        return f"{printable(text[:most])} (and {len(text) - most} more characters)"
    return printable(text)


def counted(number: int, noun: str) -> str:
    """ "1 client", "3 clients"; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock_time(seconds_from_now: float = 0.0) -> str:
    """A local time: "14:03:21"."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds_from_now))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def resume_command(folder: Path) -> str:
    """The command that continues the run of this folder."""
    return f"fedfrozen resume {shlex.quote(str(folder))}"
