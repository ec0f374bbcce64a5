"""What differs between two stored configurations."""

from typing import Any

from fedfrozen_app.config.older import WORKED_OUT, is_used, older_dataset
from fedfrozen_app.config.schema import DatasetConfig, PartitionConfig, defaults


def partition_differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What differs in how two configurations partition rows over clients; the data may have moved,
    and the tokenizer with the run's folder."""
    here, there = (_partitioning(config) for config in (now, before))
    return [key for key in here if here[key] != there[key]]


def _partitioning(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that partition rows. A key that an older version lacks means what that version did."""
    dataset = dict(older_dataset(config["dataset"])) | config["dataset"]
    unread = {name: None for name in WORKED_OUT if not is_used(name, dataset)}  # defaults of them have moved
    return {
        "seed": config["seed"],
        "num_clients": config.get("num_clients"),
        "partition": defaults(PartitionConfig) | config["partition"],
        "dataset": defaults(DatasetConfig) | dataset | {"path": None, "tokenizer": None} | unread,
    }
