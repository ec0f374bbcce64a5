"""How a run's texts become tokens: whose tokenizer, how many tokens of a text, in how many chunks.

The server decides once, from texts of its own alone (its validation rows, or a public text that the user
names), never from a client's. Clients get the decision with the data specification.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.vocabulary import FIRST_MERGE, Vocabulary, problem_of_merges
from fedfrozen_app.data.byte_tokenizer import byte_tokenizer
from fedfrozen_app.data.sources.raw_rows import read_utf8
from fedfrozen_app.data.sources.synthetic import word_tokenizer
from fedfrozen_app.data.subwords import learn, read_pieces, tokenizer_of_pieces
from fedfrozen_app.data.table import TextReading

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt", "vocab.json")
AUTO, OWN, LEARNED = "auto", "own", "learned"  # of dataset.tokenizer
CHUNKS = "chunks"  # of dataset.long_texts
USUAL = 128  # tokens, where the server has no text of its own, and in runs of versions that chose none
MOST, MOST_OF_CHUNK, MOST_CHUNKS = 512, 128, 8  # that are chosen; a user may set more
SHARE = 0.95  # of the server's texts are read whole
STEP = 8  # lengths are rounded up to these


def reading_of_spec(spec: Mapping[str, Any] | None) -> TextReading | None:
    """The server's decision, checked; None where it made none."""
    if spec is None:
        return None
    vocabulary = None
    if "merges" in spec:
        vocabulary = Vocabulary(tuple(spec["merges"]), bool(spec["lowercase"]))
        if problem_of_merges(vocabulary.merges) or vocabulary.digest != spec["digest"]:
            raise UserError("The tokenizer that the server sent is damaged: its digest is another.")
    return TextReading(int(spec["max_tokens"]), int(spec["chunks"]), vocabulary)


def choose_reading(config: Config, texts: Sequence[str], task: str) -> TextReading:
    """By the settings, and where they leave it open from the server's own `texts`."""
    dataset = config.dataset
    vocabulary = _vocabulary(config, texts, task)
    if dataset.max_tokens is not None and (dataset.max_chunks is not None or dataset.long_texts != CHUNKS):
        return TextReading(dataset.max_tokens, dataset.max_chunks or 1, vocabulary)
    own = None if vocabulary is None else tokenizer_of_pieces(vocabulary)
    lengths = lengths_of(texts, own or tokenizer_of(config)) if len(texts) else np.array([USUAL])
    needed = int(np.quantile(lengths, SHARE, method="higher"))
    if dataset.long_texts != CHUNKS:
        most = min(MOST, room_of(config))
        found = TextReading(min(-(-needed // STEP) * STEP, most), 1, vocabulary)
    else:
        length = dataset.max_tokens or min(-(-needed // STEP) * STEP, MOST_OF_CHUNK, room_of(config))
        # Each chunk has a beginning and an end of its own.
        chunks = dataset.max_chunks or min(max(-(-needed // (length - 2)), 1), MOST_CHUNKS)
        found = TextReading(length, chunks, vocabulary)
    log.info("%s", _reading_line(found, len(texts), needed))
    return found


def _reading_line(found: TextReading, texts: int, needed: int) -> str:
    if not texts:
        return (
            f"The server has no text of its own to choose a length by (dataset.validation=0): "
            f"{found.max_tokens} tokens; dataset.max_tokens sets another."
        )
    how = f"{found.max_tokens} tokens of a text"
    if found.chunks > 1:
        how = f"up to {counted(found.chunks, 'chunk')} of {found.max_tokens} tokens"
    return f"The model reads {how}: {SHARE:.0%} of the server's {texts:,} texts have at most {needed:,}."


def _vocabulary(config: Config, texts: Sequence[str], task: str) -> Vocabulary | None:
    dataset = config.dataset
    wanted = dataset.tokenizer
    if wanted == AUTO and not _learns(config):
        return None
    if wanted == OWN:
        return None
    if config.model.source in ("checkpoint", "hub"):
        raise UserError(
            f"dataset.tokenizer={wanted}: a pretrained model reads texts by its own tokenizer alone: leave "
            "it out, or choose a model from scratch."
        )
    if wanted not in (AUTO, LEARNED):
        return _named(wanted)
    source = "the server's own validation rows"
    if dataset.tokenizer_text is not None:
        texts, source = public_lines(Path(dataset.tokenizer_text).expanduser()), dataset.tokenizer_text
    if not len(texts):
        if wanted == AUTO:
            log.info(
                "The server has no text of its own to learn a tokenizer from (dataset.validation=0): texts "
                "are read as bytes; dataset.tokenizer_text=FILE names a public text."
            )
            return None
        raise UserError(
            "dataset.tokenizer=learned needs text that is the server's own: set dataset.validation above 0, "
            "or dataset.tokenizer_text=FILE."
        )
    size = _size(config)
    # Case tells names in running text; for a few classes it only makes words rarer.
    found = learn(texts, size, lowercase=task in ("text", "multilabel"))
    log.info(
        "Tokenizer: %s learned from %s of %s (SHA-256 %s).",
        *(counted(found.size, "piece"), counted(len(texts), "text"), source, found.digest[:12]),
    )
    if config.privacy.name != "none":
        log.warning(
            "The pieces can show words of the texts they were learned from, %s, and every client gets them: "
            "epsilon does not cover those texts.",
            source,
        )
    return found


def _learns(config: Config) -> bool:
    return config.model.source == "config" and config.dataset.kind != "synthetic"


def _size(config: Config) -> int:
    """Of the vocabulary; a model may have a size of its own."""
    given = config.model.config.get("vocab_size")
    size = config.dataset.vocab_size if given is None else min(int(given), config.dataset.vocab_size)
    if size < FIRST_MERGE:
        raise UserError(
            f"model.config.vocab_size={size} has no place for the 256 bytes and {FIRST_MERGE - 256} special "
            "tokens of a learned tokenizer: raise it, or set dataset.tokenizer=own."
        )
    return size


def _named(wanted: str) -> Vocabulary:
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise UserError(
            f"dataset.tokenizer={wanted} is no file: use auto, own, learned, or the tokenizer.json of a run."
        )
    return read_pieces(path)


def texts_of(content: Sequence[Any], task: str) -> list[str]:
    """Rows as running text."""
    if task == "tokens":
        return [" ".join(words) for words in content]
    if task == "language":
        return [f"{prompt}\n{answer}" if prompt else answer for prompt, answer in content]
    return list(content)


def public_lines(path: Path) -> list[str]:
    """Of a text file, or of all *.txt files in a folder."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    lines = [line for file in files for line in read_utf8(file).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"dataset.tokenizer_text={path} holds no text: name a UTF-8 text file.")
    return lines


def lengths_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> np.ndarray:
    """(texts,) of tokens, uncut."""
    if tokenizer is None:
        return np.array([len(text.encode()) + 1 for text in texts])
    return np.array(
        [len(ids) for ids in tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]
    )


def room_of(config: Config) -> int:
    """The longest text that a local checkpoint's positions have place for."""
    known = _config_json(config) if config.model.source == "checkpoint" else {}
    room = known.get("max_position_embeddings", known.get("n_positions"))
    if not isinstance(room, int):
        room = config.model.config.get("max_position_embeddings", MOST)
    # RoBERTa counts positions from behind its padding token.
    offset = known.get("pad_token_id", 1) + 1 if known.get("model_type") == "roberta" else 0
    return max(int(room) - offset, 2)


# Tokenizers that a model brings -----------------------------------------------------------------------------


def tokenizer_for(config: Config, reading: TextReading | None) -> PreTrainedTokenizerBase | None:
    """The run's: learned, or the model's own; None for bytes, and for pictures."""
    if reading is not None and reading.vocabulary is not None:
        return tokenizer_of_pieces(reading.vocabulary)
    return tokenizer_of(config)


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase | None:
    """The checkpoint's own; None (bytes) for a model that brings none, or for pictures."""
    source, path = config.model.source, str(config.model.path)
    if config.dataset.kind == "synthetic" and source == "config":
        return word_tokenizer()
    if config.dataset.kind in ("digits", "digit_words", "images") or source not in ("checkpoint", "hub"):
        return None
    # Asked for one that is not there, transformers makes up an empty tokenizer for some architectures.
    if source == "checkpoint" and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        _check_bytes_will_do(config)
        return None
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=source == "checkpoint", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        if source == "checkpoint":
            raise UserError(f"The tokenizer in {path} cannot be read: {error}") from error
        log.info("%s brings no tokenizer: texts would be read as bytes.", path)
        return None


def _check_bytes_will_do(config: Config) -> None:
    """A pretrained language model knows tokens by number, and bytes would be words it never saw."""
    known = _config_json(config) if config.dataset.kind == "instructions" else {}
    if known and known.get("vocab_size") != len(byte_tokenizer()):
        raise UserError(
            f"{config.model.path} holds no tokenizer, and a language model reads texts by its own alone: put "
            "its tokenizer.json (or tokenizer.model) there."
        )


def _config_json(config: Config) -> dict[str, Any]:
    try:
        known = json.loads((Path(str(config.model.path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the model's builder has a better sentence
    return known if isinstance(known, dict) else {}
