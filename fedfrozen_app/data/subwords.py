"""A subword tokenizer that is learned from texts: byte-level BPE (Sennrich et al. 2016), as in GPT-2.

No text is unknown to it: what no merge covers stays bytes. The same texts give the same merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.core.vocabulary import FIRST_MERGE, SPECIAL, Vocabulary, problem_of_merges

PAD, BEGIN, END, UNKNOWN = SPECIAL
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FEWEST = 2  # times that a pair must occur to be joined
ANOTHER = "give the tokenizer.json of a run that learned its pieces; others belong into a model's folder"


def learn(texts: Iterable[str], size: int, *, lowercase: bool) -> Vocabulary:
    """At most `size` pieces; fewer where no further pair occurs twice."""
    tokenizer = _bare(BPE(), lowercase)
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=FEWEST,
        special_tokens=list(SPECIAL),
        initial_alphabet=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _vocabulary(json.loads(tokenizer.to_str())["model"]["merges"], lowercase)


def tokenizer_of_pieces(found: Vocabulary) -> PreTrainedTokenizerFast:
    names = piece_names(found)
    merges = [(names[left], names[right]) for left, right in found.pairs]
    numbers = {name: number for number, name in reversed(list(enumerate(names)))}
    tokenizer = _bare(BPE(numbers, merges), found.lowercase)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(name, numbers[name]) for name in (BEGIN, END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": PAD, "cls_token": BEGIN, "sep_token": END, "eos_token": END, "unk_token": UNKNOWN},
    )


def piece_names(found: Vocabulary) -> list[str]:
    """By token number; a space is written as Ġ."""
    names = [*SPECIAL, *BYTES]
    for left, right in found.pairs:
        names.append(names[left] + names[right])
    return names


def read_pieces(path: Path) -> Vocabulary:
    """Of the tokenizer.json that a run wrote."""
    try:
        found = json.loads(path.read_text("utf-8"))
        normalizer = json.dumps(found["normalizer"])
        vocabulary = _vocabulary(found["model"]["merges"], "Lowercase" in normalizer)
    except DAMAGED as error:
        raise UserError(f"{path} holds no learned pieces ({type(error).__name__}): {ANOTHER}.") from error
    if problem := problem_of_merges(vocabulary.merges):
        raise UserError(f"{path} holds no learned pieces ({problem}): {ANOTHER}.")
    return vocabulary


def tokenizer_json(found: Vocabulary) -> str:
    """As a file that the `tokenizers` library and transformers load."""
    backend: Any = tokenizer_of_pieces(found).backend_tokenizer
    return str(backend.to_str(pretty=True))


def _bare(model: BPE, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    parts = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocabulary(merges: list[Any], lowercase: bool) -> Vocabulary:
    """From merges of names, as the library writes them."""
    numbers = {name: number for number, name in enumerate([*SPECIAL, *BYTES])}
    flat: list[int] = []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        flat += [numbers[left], numbers[right]]
        # Two merges may give one name: it keeps its first number, which later merges mean.
        numbers.setdefault(left + right, FIRST_MERGE + len(flat) // 2 - 1)
    return Vocabulary(tuple(flat), lowercase)
