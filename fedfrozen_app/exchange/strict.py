"""Strict JSON from an untrusted sender: plain values within bounds, or a `ValueError`; and canonical text.

Python's json module takes the last of two equal keys, accepts NaN, and nests as deep as its stack: all of
that is rejected here, as are strings that are not text (half of a surrogate pair).
"""

import hashlib
import json
import math
import re
from functools import cached_property
from typing import Any

LARGEST = 2**53  # beyond it a float no longer distinguishes integers
LONGEST_NUMBER = 40  # characters
# Possessive quantifiers, and a text may end within a string: one pass, whatever an attacker writes.
BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def read_json(text: str, *, most: int, depth: int, longest: int) -> Any:
    """The value; at most `most` characters, `depth` nested brackets, and strings of `longest` characters."""
    if not isinstance(text, str) or len(text) > most:
        raise ValueError("it is too long")
    _check_depth(text, depth)
    try:
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=_constant,
        )
    except RecursionError as error:  # the stack was nearly full before
        raise ValueError("it is nested too deeply") from error
    _check_strings(found, longest)
    return found


def canonical(value: Any) -> str:
    """The canonical text of a plain value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def hash_of(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


class Spelled:
    """A request to a site: `plain` values, with their canonical text and its hash."""

    plain: Any

    @cached_property
    def text(self) -> str:
        return canonical(self.plain)

    @cached_property
    def hash(self) -> str:
        """The hash that people at a site and at the server compare, to know that they see the same
        request."""
        return hash_of(self.plain)


def _check_depth(text: str, most: int) -> None:
    depth = 0
    for found in BRACKETS.finditer(text):
        mark = found.group()
        if mark in "[{":
            depth += 1
            if depth > most:
                raise ValueError("it is nested too deeply")
        elif mark in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it holds a key twice")
    return found


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER or abs(value := int(text)) > LARGEST:
        raise ValueError("it holds a number out of bounds")
    return value


def _number(text: str) -> float:
    if len(text) > LONGEST_NUMBER or not math.isfinite(value := float(text)):
        raise ValueError("it holds a number out of bounds")
    return value


def _constant(text: str) -> float:
    raise ValueError("it holds NaN or an infinity")


def _check_strings(value: Any, longest: int) -> None:
    if isinstance(value, str):
        if len(value) > longest:
            raise ValueError("it holds a text that is too long")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("it holds a string that is not Unicode text") from error
    elif isinstance(value, list):
        for item in value:
            _check_strings(item, longest)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key, longest)
            _check_strings(item, longest)
