"""Texts, texts given as words with tags, and prompts with answers, as token numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Rows
from fedfrozen_app.data.table import CONTINUED, IGNORED
from fedfrozen_app.errors import UserError

logger = logging.getLogger(__name__)
COLUMNS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Encoded:
    """Train and test rows below one another, padded to one width."""

    inputs: dict[str, Tensor]  # each (n, tokens)
    vocab_size: int
    pad_token_id: int
    labels: Tensor | None = None  # (n, tokens) where words have tags, or tokens are to be foretold

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
    if tokenizer is None:
        # A character is at least a byte, so no more than these can matter.
        texts = [text[: spec.max_tokens] for text in texts]
    tokenizer = _with_padding(tokenizer)
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
    return Encoded(inputs, len(tokenizer), int(tokenizer.pad_token_id))


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
    tokenizer = _with_padding(tokenizer)
    pad = int(tokenizer.pad_token_id)
    width = max(len(ids) for ids, _ in pieces)
    inputs = {name: torch.zeros(len(pieces), width, dtype=torch.int64) for name in COLUMNS}
    inputs["input_ids"].fill_(pad)
    labels = torch.full((len(pieces), width), IGNORED)
    cut = 0
    for row, ((ids, words), word_tags) in enumerate(zip(pieces, tags, strict=True)):
        inputs["input_ids"][row, : len(ids)] = torch.tensor(ids)
        inputs["attention_mask"][row, : len(ids)] = 1
        previous = None
        for place, word in enumerate(words):
            if word is not None:
                labels[row, place] = CONTINUED if word == previous else word_tags[word]
            previous = word
        last = max((word for word in words if word is not None), default=-1)
        cut += sum(tag > 0 for tag in word_tags[last + 1 :])
    if cut:
        logger.warning(
            "%d words of entities lie beyond dataset.max_tokens=%d and are not judged.", cut, spec.max_tokens
        )
    return Encoded(inputs, len(tokenizer), pad, labels)


def continuations(
    train: Rows, test: Rows, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None
) -> Encoded:
    """Rows for a language model: beginning, prompt, answer, end. A label is the token itself where the loss
    counts it: in the answer and its end, and with `dataset.prompt_loss` in the prompt too.

    Prompt and answer become tokens apart from one another, so that a prompt without an answer has the very
    tokens that training saw.
    """
    tokenizer = _with_padding(tokenizer)
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
    cut = sum(
        len(ids) < len(first) + len(prompt) + len(answer) + len(last)
        for (ids, _), prompt, answer in zip(found, prompts, answers, strict=True)
    )
    if cut:
        logger.info("%d of %d texts are cut at dataset.max_tokens=%d.", cut, len(rows), spec.max_tokens)
    pad = int(tokenizer.pad_token_id)
    width = max(len(ids) for ids, _ in found)
    inputs = {name: torch.zeros(len(found), width, dtype=torch.int64) for name in COLUMNS}
    inputs["input_ids"].fill_(pad)
    labels = torch.full((len(found), width), IGNORED)
    for row, (ids, begin) in enumerate(found):
        inputs["input_ids"][row, : len(ids)] = torch.tensor(ids)
        inputs["attention_mask"][row, : len(ids)] = 1
        labels[row, begin : len(ids)] = torch.tensor(ids[begin:])
    return Encoded(inputs, len(tokenizer), pad, labels)


def _one_row(
    first: list[int], prompt: list[int], answer: list[int], spec: DatasetSpec
) -> tuple[list[int], int]:
    """(tokens, where those begin that count). Of a long row the prompt keeps at most half: what lies at its
    end, nearest to the answer."""
    room = spec.max_tokens - len(first)
    kept = prompt[max(len(prompt) - max(room // 2, room - len(answer)), 0) :]
    ids = [*first, *kept, *answer][: spec.max_tokens]
    begin = len(first) + (0 if spec.prompt_loss else len(kept))
    return ids, max(begin, 1)  # nothing stands before the first token to foretell it by


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
    space, end, shift = 32 + 3, 1, 3
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


def _with_padding(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    tokenizer = ByT5Tokenizer() if tokenizer is None else tokenizer
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("The tokenizer has neither a padding nor an end token: give it one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
