"""The rows that a census counts: a simulated client's, or all rows of a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fedfrozen_app.census.measure import Tokens
from fedfrozen_app.census.records import Records, records_of
from fedfrozen_app.config import Config, DatasetConfig, compose_run
from fedfrozen_app.data.federated import dataset_of, share_out, spec_of
from fedfrozen_app.data.sources import prepare, undecoded
from fedfrozen_app.data.sources import read as read_rows
from fedfrozen_app.data.sources.raw_rows import Rows
from fedfrozen_app.data.text_reading import TOKENIZER_FILES, tokenizer_of

AT_ONCE = 1000  # texts that are tokenized in one batch


def records_of_clients(config: Config, count: int | None) -> dict[str, Records]:
    """The training rows of every simulated client, by the name of its partition."""
    rows = prepare(spec_of(dataset_of(config), None, config))
    corpus = undecoded(rows, config.dataset.name)
    parts = share_out(corpus, config, count).partition
    assert parts is not None
    whole = records_of(rows.train, rows.task, rows.unit, _public(rows.classes, rows.task))
    return {
        name: _part(whole, rows.train, index, rows.unit)
        for name, index in zip(parts.names, parts.indices, strict=True)
    }


def _part(whole: Records, rows: Rows, index: np.ndarray, unit: str | None) -> Records:
    return records_of(rows.take(index.tolist()), whole.task, unit, whole.classes)


def records_of_folder(
    dataset: DatasetConfig, path: str | None = None, classes: Sequence[str] = ()
) -> Records:
    """All rows that a site's reader finds, missing values included."""
    found, unit = read_rows(spec_of(dataset, path))
    rows = found.train
    if found.test is not None:
        shared = [name for name in rows.columns if name in found.test.columns]
        rows = Rows(
            rows.content + found.test.content,
            rows.labels + found.test.labels,
            {name: rows.columns[name] + found.test.columns[name] for name in shared},
            rows.origins + found.test.origins,
        )
    return records_of(rows, found.task, unit, _public(tuple(classes), found.task))


def _public(classes: Sequence[str], task: str) -> list[str]:
    """The classes as labels are counted: for tags on words, the entity types."""
    if task != "tokens":
        return list(classes)
    return [
        *dict.fromkeys(name[2:] if name[:2] in ("B-", "I-") else name for name in classes if name != "O"),
        "none",
    ]


@lru_cache(maxsize=1)
def simulated(overrides: str, count: int | None) -> tuple[Config, Mapping[str, Records]]:
    """The configuration and rows of simulated clients; cached, as one process answers for several clients."""
    config = compose_run(overrides).config
    return config, records_of_clients(config, count)


def tokens_of(config: Config) -> Tokens | None:
    """The configured model's tokenizer as a counter; None if it reads bytes."""
    tokenizer = tokenizer_of(config)
    return None if tokenizer is None else counting(tokenizer)


def tokens_of_model(folder: str) -> Tokens | None:
    """`tokens_of` for a model's folder at a site."""
    if not any((Path(folder) / name).exists() for name in TOKENIZER_FILES):
        return None
    return counting(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def counting(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    unknown = tokenizer.unk_token_id

    def count(texts: list[str]) -> list[tuple[int, int]]:
        found = []
        for start in range(0, len(texts), AT_ONCE):
            for ids in tokenizer(texts[start : start + AT_ONCE], truncation=False, verbose=False)[
                "input_ids"
            ]:
                found.append((len(ids), 0 if unknown is None else ids.count(unknown)))
        return found

    return count
