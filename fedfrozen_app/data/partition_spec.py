"""How a partition is asked for, and what comes out: which client holds which train rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.row_lists import RowLists, row_lists

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

    indices: RowLists
    note: str
    names: Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", row_lists(self.indices))


def client_sizes(indices: RowLists) -> str:
    return f"{counted(len(indices), 'client')} with {spread(indices)} examples"


def spread(indices: RowLists) -> str:
    fewest, most = indices.sizes.min(), indices.sizes.max()
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"
