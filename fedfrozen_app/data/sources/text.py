"""Texts, texts given as words with tags, and prompts with answers, as token numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.byte_tokenizer import byte_tokenizer
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Rows
from fedfrozen_app.data.table import CONTINUED, IGNORED

logger = logging.getLogger(__name__)
COLUMNS = ("input_ids", "attention_mask")
BYTE_END, BYTE_SHIFT = 1, 3  # of ByT5: its end token, and the number of byte 0


@dataclass(frozen=True)
class Encoded:
    """Train and test rows below one another, padded to one width."""

    inputs: dict[str, Tensor]  # each (n, tokens)
    vocab_size: int
    pad_token_id: int
    cut: list[bool]  # (n,) whether a text is longer than what the model reads
    labels: Tensor | None = None  # (n, tokens) where words have tags, or tokens are to be predicted

    def parts(self, split: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The first `split` rows, and the others."""
        return (
            {name: value[:split].clone() for name, value in self.inputs.items()},
            {name: value[split:].clone() for name, value in self.inputs.items()},
        )


def tokenise(
    train: Rows, test: Rows, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None
) -> Encoded:
    texts = train.content + test.content
    if spec.chunks > 1:
        return _in_chunks(texts, spec, tokenizer)
    cut: list[bool] | None = None
    if tokenizer is None:
        cut = [len(text.encode("utf-8", "replace")) + 1 > spec.max_tokens for text in texts]
        # A character is at least a byte, so no more than these can matter.
        texts = [text[: spec.max_tokens] for text in texts]
    tokenizer = with_padding(tokenizer)
    # In one call, so that train and test are padded to the same width.
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=spec.max_tokens,
        padding="longest",
        padding_side="right",  # on the left, the longest text of all would move every other's positions
        return_attention_mask=True,
        return_tensors="pt",
    )
    inputs = {name: encoded[name].to(torch.int64) for name in COLUMNS}
    if cut is None:
        cut = (
            [bool(one.overflowing) for one in encoded.encodings]
            if tokenizer.is_fast
            else _cut(texts, spec, tokenizer)
        )
    return Encoded(inputs, len(tokenizer), int(tokenizer.pad_token_id), cut)


def _cut(texts: list[str], spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    return [len(ids) > spec.max_tokens for ids in tokenizer(texts, verbose=False)["input_ids"]]


def _in_chunks(texts: list[str], spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None) -> Encoded:
    """(texts, chunks, tokens): each chunk begins and ends as a text does. One that a text does not fill has a
    single token, which marks it as empty (models/chunks.py) and keeps attention over it finite."""
    parts = _byte_chunks(texts, spec) if tokenizer is None else _piece_chunks(texts, spec, tokenizer)
    tokenizer = with_padding(tokenizer)
    pad, most = int(tokenizer.pad_token_id), spec.chunks
    width = max(len(ids) for chunks in parts for ids in chunks)
    inputs = {name: torch.zeros(len(texts), most, width, dtype=torch.int64) for name in COLUMNS}
    inputs["input_ids"].fill_(pad)
    inputs["attention_mask"][:, :, 0] = 1
    for row, chunks in enumerate(parts):
        for place, ids in enumerate(chunks[:most]):
            inputs["input_ids"][row, place, : len(ids)] = torch.tensor(ids)
            inputs["attention_mask"][row, place, : len(ids)] = 1
    return Encoded(inputs, len(tokenizer), pad, [len(chunks) > most for chunks in parts])


def _piece_chunks(
    texts: list[str], spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase
) -> list[list[list[int]]]:
    if not tokenizer.is_fast:
        raise UserError("dataset.long_texts=chunks needs a fast tokenizer: give a tokenizer.json.")
    encoded = tokenizer(texts, truncation=True, max_length=spec.max_tokens)
    return [[one.ids, *(more.ids for more in one.overflowing)] for one in encoded.encodings]


def _byte_chunks(texts: list[str], spec: DatasetSpec) -> list[list[list[int]]]:
    room, found = spec.max_tokens - 1, []
    for text in texts:
        data = [byte + BYTE_SHIFT for byte in text.encode("utf-8", "replace")]
        parts = [data[start : start + room] for start in range(0, max(len(data), 1), room)]
        found.append([[*part, BYTE_END] for part in parts])
    return found


def tag_words(
    train: Rows,
    test: Rows,
    tags: list[list[int]],
    spec: DatasetSpec,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Encoded:
    """Words as tokens: a word's first piece carries its tag, the others are marked as its continuation."""
    sentences = train.content + test.content
    pieces = _bytes_of(sentences, spec) if tokenizer is None else _pieces_of(sentences, spec, tokenizer)
    tokenizer = with_padding(tokenizer)
    pad = int(tokenizer.pad_token_id)
    width = max(len(ids) for ids, _ in pieces)
    inputs = {name: torch.zeros(len(pieces), width, dtype=torch.int64) for name in COLUMNS}
    inputs["input_ids"].fill_(pad)
    labels = torch.full((len(pieces), width), IGNORED)
    cut, lost = [False] * len(pieces), 0
    for row, ((ids, words), word_tags) in enumerate(zip(pieces, tags, strict=True)):
        inputs["input_ids"][row, : len(ids)] = torch.tensor(ids)
        inputs["attention_mask"][row, : len(ids)] = 1
        previous = None
        for place, word in enumerate(words):
            if word is not None:
                labels[row, place] = CONTINUED if word == previous else word_tags[word]
            previous = word
        last = max((word for word in words if word is not None), default=-1)
        cut[row] = last + 1 < len(word_tags)
        lost += sum(tag > 0 for tag in word_tags[last + 1 :])
    if lost:
        logger.warning(
            "%d words of entities lie beyond dataset.max_tokens=%d and are not scored.", lost, spec.max_tokens
        )
    return Encoded(inputs, len(tokenizer), pad, cut, labels)


def continuations(
    train: Rows, test: Rows, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None
) -> Encoded:
    """Rows for a language model: beginning, prompt, answer, end. A label is the token itself where the loss
    counts it: in the answer and its end, and with `dataset.prompt_loss` in the prompt too.

    Prompt and answer become tokens apart from one another, so that a prompt without an answer has the very
    tokens that training saw.
    """
    tokenizer = with_padding(tokenizer)
    first = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    last = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    rows = train.content + test.content
    between = "\n" if spec.separator is None else spec.separator
    asked = [text + between if text else "" for text, _ in rows]
    prompts, answers = _plain_tokens(asked, tokenizer), _plain_tokens([text for _, text in rows], tokenizer)
    found = [
        _one_row(first, prompt, [*answer, *last], spec)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    cut = [
        len(ids) < len(first) + len(prompt) + len(answer) + len(last)
        for (ids, _), prompt, answer in zip(found, prompts, answers, strict=True)
    ]
    pad = int(tokenizer.pad_token_id)
    width = max(len(ids) for ids, _ in found)
    inputs = {name: torch.zeros(len(found), width, dtype=torch.int64) for name in COLUMNS}
    inputs["input_ids"].fill_(pad)
    labels = torch.full((len(found), width), IGNORED)
    for row, (ids, begin) in enumerate(found):
        inputs["input_ids"][row, : len(ids)] = torch.tensor(ids)
        inputs["attention_mask"][row, : len(ids)] = 1
        labels[row, begin : len(ids)] = torch.tensor(ids[begin:])
    return Encoded(inputs, len(tokenizer), pad, cut, labels)


def _one_row(
    first: list[int], prompt: list[int], answer: list[int], spec: DatasetSpec
) -> tuple[list[int], int]:
    """(tokens, where those begin that count). Of a long row the prompt keeps at most half: what lies at its
    end, nearest to the answer."""
    room = spec.max_tokens - len(first)
    kept = prompt[max(len(prompt) - max(room // 2, room - len(answer)), 0) :]
    ids = [*first, *kept, *answer][: spec.max_tokens]
    begin = len(first) + (0 if spec.prompt_loss else len(kept))
    return ids, max(begin, 1)  # no token precedes the first to predict it from


def _plain_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Without the tokens that mark a beginning or an end."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]


Pieces = list[tuple[list[int], list[int | None]]]  # token ids, and for each the number of its word


def _pieces_of(sentences: list[list[str]], spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    if not tokenizer.is_fast:
        raise UserError("Entities need a tokenizer that knows where words begin: give a tokenizer.json.")
    encoded = tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=spec.max_tokens)
    return [(ids, encoded.word_ids(row)) for row, ids in enumerate(encoded["input_ids"])]


def _bytes_of(sentences: list[list[str]], spec: DatasetSpec) -> Pieces:
    """Bytes in ByT5's numbering, a space between words, and its end token."""
    space, end, shift = 32 + BYTE_SHIFT, BYTE_END, BYTE_SHIFT
    found: Pieces = []
    for sentence in sentences:
        ids: list[int] = []
        words: list[int | None] = []
        for number, word in enumerate(sentence):
            data = word.encode()
            ids += [byte + shift for byte in data] + [space]
            words += [number] * len(data) + [None]
        room = spec.max_tokens - 1
        found.append(([*ids[:-1][:room], end], [*words[:-1][:room], None]))
    return found


def with_padding(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer that texts are read with: bytes where there is none."""
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("The tokenizer has neither a padding nor an end token: give it one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
