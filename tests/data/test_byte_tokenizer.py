"""Our bytes as tokens are ByT5's, by number, and what they stand for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from fedfrozen_app.data.byte_tokenizer import byte_tokenizer

THEIRS, OURS = ByT5Tokenizer(), byte_tokenizer()
TEXTS = ["", " ", "two  spaces", "größer 𝄞\x00\n\tend ", "a </s> b", "<pad>x <unk> y", "<extra_id_3> z"]


def same(text, length):
    cut = {"truncation": True, "max_length": length}
    for options in ({}, cut, {"add_special_tokens": False}, {**cut, "padding": "max_length"}):
        assert OURS(text, **options)["input_ids"] == THEIRS(text, **options)["input_ids"], options
    ids = THEIRS(text)["input_ids"]
    assert OURS.decode(ids) == THEIRS.decode(ids)
    assert OURS.decode(ids, skip_special_tokens=True) == THEIRS.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_the_numbers_are_byt5_s(text):
    same(text, 6)


def test_the_vocabularies_are_the_same():
    assert len(OURS) == len(THEIRS) == 384
    assert OURS.get_added_vocab() == THEIRS.get_added_vocab()
    for name in ("pad_token_id", "eos_token_id", "unk_token_id", "bos_token_id"):
        assert getattr(OURS, name) == getattr(THEIRS, name)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.text(max_size=60).filter(lambda text: not text.rstrip().endswith("</s>")), st.integers(2, 40))
def test_of_any_text(text, length):
    same(text, length)
