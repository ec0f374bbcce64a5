"""How a partition is asked for, and what comes out: which client holds which train rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfrozen_app.core.formatting import counted

DRAWN = ("dirichlet", "iid", "labels", "shards", "quantity", "noise")  # for any number of clients
NAMES = (*DRAWN, "natural", "domain", "file", "like")


@dataclass(frozen=True)
class PartitionSpec:
    name: str = "dirichlet"  # one of NAMES
    alpha: float = 0.3  # Dirichlet concentration: small is skewed, large is even
    column: str | None = None  # for natural and domain; None: the obvious one
    min_size: int = 10  # rows that a drawn client holds at least
    clients_per_domain: int = 1
    labels: int = 2  # classes of a client, for labels
    shards: int = 2  # of a client, for shards
    balanced: bool = False  # dirichlet: equal sizes
    capped: bool = False  # dirichlet: a client with its share of rows gets none of the classes that follow
    noise: float = 0.0  # standard deviation of the noisiest client's pictures (partition_noise.py)
    path: str | None = None  # for file (partition_file.py)
    census: str | None = None  # for like (partition_like.py)


@dataclass(frozen=True)
class Partition:
    """Train row numbers per client, sorted; together every row exactly once (with `like`: or never)."""

    indices: tuple[np.ndarray, ...]
    note: str
    names: tuple[str, ...]


def client_sizes(indices: Sequence[np.ndarray]) -> str:
    return f"{counted(len(indices), 'client')} with {spread(indices)} examples"


def spread(indices: Sequence[np.ndarray]) -> str:
    sizes = [len(rows) for rows in indices]
    return f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
