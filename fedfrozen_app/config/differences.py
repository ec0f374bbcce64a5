"""Differences between two stored configurations."""

from typing import Any

from fedfrozen_app.config.older import WORKED_OUT, is_used, older_dataset
from fedfrozen_app.config.schema import DatasetConfig, PartitionConfig, defaults


def partition_differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Differences in how two configurations partition rows over clients; paths of data and tokenizer may
    differ."""
    here, there = (_partitioning(config) for config in (now, before))
    return [key for key in here if here[key] != there[key]]


def _partitioning(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that partition rows. Keys missing in an older version get that version's behaviour."""
    dataset = dict(older_dataset(config["dataset"])) | config["dataset"]
    unread = {name: None for name in WORKED_OUT if not is_used(name, dataset)}  # their defaults have changed
    return {
        "seed": config["seed"],
        "num_clients": config.get("num_clients"),
        "partition": defaults(PartitionConfig) | config["partition"],
        "dataset": defaults(DatasetConfig) | dataset | {"path": None, "tokenizer": None} | unread,
    }
