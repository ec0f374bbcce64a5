"""The draws of flwr-datasets: IID and Dirichlet, which always terminate.

Its Dirichlet partitioner gives up when a client stays below the minimum size; here the shortfall is then
moved from other clients, and the note states it. flwr-datasets is imported where it is used: its plotting
libraries cost two seconds, which a deployed site with data of its own would pay for every message.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data import partition_rules as rules
from fedfrozen_app.data.partition_spec import PartitionSpec

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

# Each purpose draws from its own stream, so that one more draw here never shifts another.
IID_STREAM, DIRICHLET_STREAM, RULES_STREAM = 1, 2, 5


def load_all(partitioner: Partitioner, dataset: Dataset) -> list[np.ndarray]:
    partitioner.dataset = dataset
    parts = (partitioner.load_partition(n) for n in range(partitioner.num_partitions))
    return [np.array(part[:]["index"], dtype=np.int64) for part in parts]


def iid(rows: int, count: int, seed: int) -> tuple[np.ndarray, ...]:
    from flwr_datasets.partitioner import IidPartitioner  # lazy: see the module's docstring

    # IidPartitioner cuts contiguous shards, so the shuffle has to happen before.
    shuffled = np.random.default_rng([seed, IID_STREAM]).permutation(rows)
    shards = load_all(IidPartitioner(count), Dataset.from_dict({"index": shuffled}))
    return tuple(np.sort(shard) for shard in shards)


def dirichlet(
    labels: np.ndarray, count: int, spec: PartitionSpec, key: tuple[int, ...]
) -> tuple[tuple[np.ndarray, ...], str]:
    """Rows per client, and what was done in words."""
    from flwr_datasets.partitioner import DirichletPartitioner

    dataset = Dataset.from_dict({"index": np.arange(len(labels)), "label": labels})
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])

    def draw(min_size: int) -> list[np.ndarray]:
        partitioner = DirichletPartitioner(
            count,
            "label",
            float(spec.alpha),
            min_partition_size=min_size,
            self_balancing=spec.capped,
            seed=seed,
        )
        return load_all(partitioner, dataset)

    title = f"Dirichlet({spec.alpha:g}){', capped' if spec.capped else ''}"
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            clients, out_of_patience = draw(spec.min_size), False
        except ValueError:  # it gives up after its tenth draw; every other cause is checked above
            clients, out_of_patience = draw(0), True
    if out_of_patience:
        short = sum(len(client) < spec.min_size for client in clients)
        drawn = rules.label_entropy(clients, labels)
        clients, moved = rules.fill_up(clients, labels, spec.min_size)
        title += (
            f" left {short} of {count} clients under {spec.min_size} examples; "
            f"moved {counted(moved, 'example')} ({moved / len(labels):.0%}) to them, each time of one class "
            f"and one client where there were enough; mean label entropy {drawn:.2f} as drawn, "
            f"{rules.label_entropy(clients, labels):.2f} now"
        )
    elif complaints:
        title += f", drawn {len(complaints) + 1} times for the minimum size"
    return tuple(np.sort(client) for client in clients), title
