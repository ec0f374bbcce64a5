"""Untrusted JSON, and untrusted values for a dataclass of settings."""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fedfrozen_app.config import setting
from fedfrozen_app.config.strict_values import read_strict
from fedfrozen_app.exchange.strict import canonical, hash_of, read_json


def read(text):
    return read_json(text, most=1000, depth=3, longest=20)


@pytest.mark.parametrize("value", [None, True, 0, -3, 2**53, 1.5, 'ä[{"', [], {}, {"a": [{"b": 1}]}])
def test_what_is_plain_is_read_as_json_reads_it(value):
    assert read(json.dumps(value)) == value
    assert read(canonical(value)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[[[1]]]]", "nested too deeply"),
        ("[" * 900, "nested too deeply"),
        (" " * 1001, "too long"),
        ('{"a":1,"a":1}', "a key twice"),
        ('[{"a":1,"\\u0061":1}]', "a key twice"),
        ("NaN", "NaN or an infinity"),
        ("[-Infinity]", "NaN or an infinity"),
        ("1e400", "out of bounds"),
        (str(2**53 + 1), "out of bounds"),
        ("9" * 400, "out of bounds"),
        ("0." + "1" * 400, "out of bounds"),
        (f'"{"a" * 21}"', "a text that is too long"),
        (f'{{"{"a" * 21}":1}}', "a text that is too long"),
        ('"\\ud800"', "a string that is not Unicode text"),
        ('{"\\udfff":1}', "a string that is not Unicode text"),
    ],
)
def test_what_is_not_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        read(text)


def test_brackets_within_a_text_are_no_depth():
    assert read('["[[[[", "\\"[[[["]') == ["[[[[", '"[[[[']


def test_one_spelling():
    assert canonical({"b": 1.0, "a": "ä"}) == '{"a":"\\u00e4","b":1.0}'
    assert hash_of({"b": 1, "a": 2}) == hash_of({"a": 2, "b": 1}) != hash_of({"a": 2, "b": 1.5})


@dataclass(frozen=True)
class Mine:
    """What somebody else's strategy might have."""

    rate: float = setting(0.5, "", above=0, most=1)
    rule: str = setting("a", "", choices=("a", "b"))
    when: int | str | None = None
    layers: list[int] | None = None
    names: tuple[str, ...] = ()
    more: dict[str, float] = field(default_factory=dict)
    tokens: Any = None
    flag: bool = False
    way: Literal["up", "down"] = "up"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rate": 1, "when": "auto", "layers": [1, 2], "more": {"x": 1}, "tokens": [1, "cls"]},
        {"when": 3, "names": ["a"], "flag": True, "way": "down", "layers": None},
    ],
)
def test_settings_of_their_types_are_taken(given):
    made = read_strict(Mine, given)
    assert all(
        getattr(made, key) in (value, tuple(value) if key == "names" else value)
        for key, value in given.items()
    )
    assert type(made.rate) is float


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rate": "0.5"}, "rate is of another type"),
        ({"rate": True}, "rate is of another type"),
        ({"rate": 2}, "rate is out of bounds"),
        ({"rule": "c"}, "rule is out of bounds"),
        ({"when": 1.5}, "when is of another type"),
        ({"when": False}, "when is of another type"),
        ({"layers": [1, "2"]}, "layers is of another type"),
        ({"names": "abc"}, "names is of another type"),
        ({"more": {"x": "y"}}, "more is of another type"),
        ({"flag": 1}, "flag is of another type"),
        ({"way": "left"}, "way is of another type"),
        ({"other": 1}, "a key that is not known"),
        ([], "no mapping"),
    ],
)
def test_settings_of_another_type_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        read_strict(Mine, given)


def test_a_whole_document_leaves_nothing_out():
    with pytest.raises(ValueError, match="rate is missing"):
        read_strict(Mine, {}, whole=True)
    with pytest.raises(ValueError, match="not known"):
        read_strict(Mine, {"rate": 0.1}, without=("rate",))


@pytest.mark.parametrize("piece", ['\\"', '"', '["', '"\\', "\\", "{}", '"a\\"'])
def test_a_long_text_is_read_in_one_pass(piece):
    """A string that never ends was searched again from each of its quotes: 32 kB took eight seconds."""
    text = '"' + piece * 100_000
    began = time.process_time()
    with pytest.raises(ValueError):
        read_json(text, most=10**6, depth=3, longest=20)
    assert time.process_time() - began < 2  # a tenth of a second; hours before
