"""Keys missing in stored configurations of older versions, and the behaviour of such runs."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fedfrozen_app.config.schema import DatasetConfig
from fedfrozen_app.config.settings import about

WORKED_OUT = ("max_tokens", "max_chunks")
DATASET = {"unmarked": "files", "tokenizer": "own"}  # for other missing keys, the default is what the run did


def older_dataset(before: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of `dataset` that a run lacked, with their effective values; only those used by its kind of
    data."""
    for name, value in DATASET.items():
        if name not in before and is_used(name, before):
            yield name, value


def worked_out(before: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that a run derived from its initial data: they are kept when it continues, or is used, with
    other data."""
    for name in WORKED_OUT:
        if before.get(name) is not None and is_used(name, before):
            yield name, before[name]


def is_used(name: str, dataset: Mapping[str, Any]) -> bool:
    """Whether data of this kind are read by this key."""
    (needs,) = (about(one).needs for one in fields(DatasetConfig) if one.name == name)
    return all(need.met(str(dataset.get("kind"))) for need in needs if need.key == "dataset")
