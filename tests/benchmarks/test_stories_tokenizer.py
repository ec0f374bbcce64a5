"""A vocabulary as llama2.c keeps it becomes a tokenizer that joins what scores highest first."""

import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stories_tokenizer

LETTERS = [" ", "a", "b", "c"]
JOINED = {" a": -1.0, "bc": -2.0, "ab": -3.0, " ab": -4.0, " abc": -5.0}


def tokenizer():
    tokens = [
        (b"<unk>", 0.0),
        (b"\n<s>\n", 0.0),
        (b"\n</s>\n", 0.0),
        *((bytes([n]), 0.0) for n in range(256)),
    ]
    tokens += [(text.encode(), score) for text, score in JOINED.items()]
    tokens += [(text.encode(), -100.0 - n) for n, text in enumerate(LETTERS)]
    data = struct.pack("<i", 6) + b"".join(
        struct.pack("<fi", score, len(text)) + text for text, score in tokens
    )
    return stories_tokenizer.tokenizer_of(data)


def test_the_pair_that_scores_highest_is_joined_first():
    made = tokenizer()
    # " a" before "bc" before "ab": so "abc" is " a" and "bc", which then join to " abc".
    assert made.tokenize("abc") == ["▁abc"]
    assert made.tokenize("ab cab") == ["▁ab", "▁", "c", "ab"]
    assert made("abc")["input_ids"] == [1, 259 + list(JOINED).index(" abc")]


def test_what_is_in_no_token_comes_as_bytes_and_goes_back():
    made = tokenizer()
    assert made.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert made.decode(made("ab é", add_special_tokens=False)["input_ids"]) == "ab é"
