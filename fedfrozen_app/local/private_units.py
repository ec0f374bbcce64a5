"""The units that differential privacy protects (example, document, patient), and how they are sampled."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition_spec import Partition
from fedfrozen_app.privacy.coverage import noise_in_sum

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


class UnitOwners:
    """The units with rows at more than one client, computed once for all clients."""

    def __init__(self) -> None:
        self._found: dict[str, frozenset[Any]] = {}

    def several(self, parts: Partition, column: str, values: np.ndarray) -> frozenset[Any]:
        if column not in self._found:
            first: dict[Any, int] = {}
            owners, names = parts.indices.owner_of_each.tolist(), values[parts.indices.rows].tolist()
            several = {
                name
                for owner, name in zip(owners, names, strict=True)
                if first.setdefault(name, owner) != owner
            }
            self._found[column] = frozenset(several)
        return self._found[column]


def sampling(config: Config, declared: int) -> tuple[float, int]:
    """(q, steps per round), from the declared size alone, so that neither reveals the true size."""
    if noise_in_sum(config):  # all rows, once: integer noise has no equally tight bound for subsamples
        return 1.0, 1
    batch = min(config.client.batch_size, declared)
    steps = config.client.local_epochs * math.ceil(declared / batch)
    return batch / declared, min(steps, config.client.local_steps or steps)


def units_of(worker: "Worker", client: str) -> list[np.ndarray]:
    """The client's rows by unit of privacy: example, document or patient."""
    privacy = worker.config.privacy
    rows = worker.rows(client).train.numpy()
    if privacy.unit == "example":
        return list(rows[:, None])
    column = privacy.unit_column or privacy.unit
    if column not in worker.corpus.columns:
        raise UserError(
            f"privacy.unit={privacy.unit} needs a column that says whose each row is, and the data have no "
            f"column '{column}': set privacy.unit_column, or use privacy.unit=example."
        )
    values = worker.corpus.columns[column]
    names = values[rows]
    if not all(str(name).strip() for name in names):  # all of them would count as one unit
        raise UserError(
            f"A row of client {client} names no {privacy.unit} in its column '{column}', so that epsilon "
            f"cannot cover its {privacy.unit}: fill the column, or leave such rows out."
        )
    parts = worker.shares.partition
    several = frozenset() if parts is None else worker.kept.for_run(UnitOwners).several(parts, column, values)
    if shared := sorted(set(names) & several):
        raise UserError(
            f"The {privacy.unit} {shared[0]} has rows at client {client} and at another, so no client's "
            f"epsilon would cover it: partition the data by it (partition=natural partition.column={column})."
        )
    return [rows[names == name] for name in np.unique(names)]
