"""Texts as token numbers."""

from __future__ import annotations

import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from fedfrozen_app.data.sources.rows import DatasetSpec, Rows
from fedfrozen_app.errors import UserError


def tokenise(
    train: Rows, test: Rows, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]:
    texts = train.content + test.content
    if tokenizer is None:
        tokenizer = ByT5Tokenizer()
        # A character is at least a byte, so no more than these can matter.
        texts = [text[: spec.max_tokens] for text in texts]
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("The tokenizer has neither a padding nor an end token: give it one.")
        tokenizer.pad_token = tokenizer.eos_token
    # In one call, so that train and test are padded to the same width.
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=spec.max_tokens,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    inputs = {name: encoded[name].to(torch.int64) for name in ("input_ids", "attention_mask")}
    split = len(train.content)
    return (
        {name: value[:split].clone() for name, value in inputs.items()},
        {name: value[split:].clone() for name, value in inputs.items()},
        len(tokenizer),
        int(tokenizer.pad_token_id),
    )
