"""The run's own model without a federation: on all clients' rows in one place, and at each client alone.

Both begin at the run's first weights and take its rounds, rates, and local epochs or steps. They are runs of
FedAvg with one client, so that a round is that client's local training and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from fedfrozen_app.config import Config
from fedfrozen_app.config.schema.run_config import defaults, sections
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.federated import Shares
from fedfrozen_app.data.row_lists import RowLists
from fedfrozen_app.models.wrapper import wrapper_of

POOLED, ALONE = "the run's own model, all rows", "the run's own model, each site alone"
MOST_ALONE = 20  # clients that train alone; of more, an evenly spaced subset
# Settings without effect here.
RESET = ("aggregation", "clock", "codec", "checkpoint", "debug", "early_stop", "pacing", "track")
PLAIN: Mapping[str, Any] = {
    "strategy": {"name": "fedavg"},
    "server_optimizer": {"name": "none"},
    "participation": 1.0,
    "exclude_clients": None,
    "from": None,
    "personal": False,
    "baseline": False,
}
# Trains on these rows, without the excluded clients; returns the test metrics of the last round.
Train = Callable[[Shares, frozenset[str]], dict[str, float]]


def plain_settings(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration without federation settings: keeps model, data, rates and rounds."""
    known = sections()
    values = deepcopy(dict(resolved))
    values |= {name: defaults(known[name]) for name in RESET} | dict(PLAIN)
    values["runtime"] = values["runtime"] | {"name": "inprocess"}
    values["adapter"] = values["adapter"] | {"ranks": {}}
    values["track"]["tensorboard"] = False
    values["checkpoint"]["every"] = 0
    values["eval_every"] = max(1, values["num_rounds"])  # only the last round
    return values


def why_not(config: Config, plain: Config) -> str | None:
    """Why the run's own model cannot be trained without its federation; None if it can."""
    if wrapper_of(replace(plain, adapter=config.adapter)) != wrapper_of(config):
        return f"strategy={config.strategy['name']} trains parts of a model, which no other method trains"
    if config.partition.noise:
        return "partition.noise gives each client pictures of its own, which rows in one place do not have"
    return None


@dataclass(frozen=True)
class Central:
    """The clients of a run, by number, and their rows."""

    shares: Shares
    clients: tuple[int, ...]

    def name(self, client: int) -> str:
        assert self.shares.partition is not None
        return self.shares.partition.names[client]

    def rows(self, clients: Sequence[int]) -> int:
        assert self.shares.partition is not None
        return sum(len(self.shares.partition.indices[client]) for client in clients)

    def together(self) -> Shares:
        """One client that holds the rows of all of them."""
        parts, tested = self.shares.partition, self.shares.test
        assert parts is not None
        rows = np.sort(np.concatenate([np.asarray(parts.indices[client]) for client in self.clients]))
        test = (np.sort(np.concatenate([tested[client] for client in self.clients])),) if tested else ()
        note = f"All rows in one place: {counted(len(rows), 'row')}."
        one = replace(parts, indices=RowLists.of([rows]), names=("all rows",), note=note)
        return replace(self.shares, partition=one, test=test)

    def others(self, client: int) -> frozenset[str]:
        """All clients but this one, which keeps its number because its batches are drawn by that."""
        assert self.shares.partition is not None
        return frozenset(str(other) for other in range(len(self.shares.partition.indices)) if other != client)

    def drawn(self) -> tuple[int, ...]:
        """The clients that train alone."""
        if len(self.clients) <= MOST_ALONE:
            return self.clients
        places = np.linspace(0, len(self.clients) - 1, MOST_ALONE).round().astype(int)
        return tuple(self.clients[place] for place in places)


def of_run(shares: Shares, excluded: frozenset[str]) -> Central:
    assert shares.partition is not None
    numbers = range(len(shares.partition.indices))
    return Central(shares, tuple(client for client in numbers if str(client) not in excluded))


def own_scores(central: Central, train: Train) -> Iterator[dict[str, Any]]:
    """One entry for the pooled model, and one for the mean of the models that trained alone."""
    whole = central.rows(central.clients)
    began = time.perf_counter()
    metrics = train(central.together(), frozenset())
    yield {"name": POOLED, **metrics, **_size(whole, whole, began)}
    began, by_client, drawn = time.perf_counter(), {}, central.drawn()
    for client in drawn:
        by_client[central.name(client)] = train(central.shares, central.others(client))
    entry = {"name": ALONE, **mean_of(by_client), **_size(central.rows(drawn), whole, began)}
    if len(drawn) < len(central.clients):
        entry["of_clients"] = len(central.clients)
    yield entry | {"by_client": by_client}


def mean_of(by_client: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the clients that have it."""
    names = dict.fromkeys(name for metrics in by_client.values() for name in metrics)
    return {name: fmean(metrics[name] for metrics in by_client.values() if name in metrics) for name in names}


def _size(rows: int, of: int, began: float) -> dict[str, Any]:
    return {"train_rows": rows, "of_rows": of, "seconds": time.perf_counter() - began}
