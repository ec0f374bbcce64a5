"""After every round: how long it would have taken on the clients' own machines and links."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedfrozen_app.clock.client_time import ClientTime, Work, time_of
from fedfrozen_app.clock.profiles import Profile, make_profile, read_profiles
from fedfrozen_app.config import ClientConfig, Config
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.rows import Row
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.step_operations import operations_per_row
from fedfrozen_app.server.base import PlannedFedAvg

DIGITS = 6  # of a second, in a round's row


@dataclass
class VirtualTime:
    """A round lasts until its slowest client has answered. The server's own work takes no time."""

    client: ClientConfig
    period: float
    profile_of: Callable[[str], Profile]
    rows_of: Callable[[str], int]  # how many rows a client trains on
    operations: Callable[[frozenset[str]], float]  # per row, where these names train
    now: float = 0.0
    _profiles: dict[str, Profile] = field(default_factory=dict)

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        sent: Mapping[str, list[int]] = row.pop("bytes_by_client", {})
        if not sent:
            return False, {"virtual_seconds": self.now}
        number, roles = row["round"], strategy.federation.roles
        plan, chosen = strategy.client_plan(number), row.get("selection", {})
        times = {}
        for client, (down, up) in sent.items():
            own = plan
            if client in chosen:  # what this client took of the plan
                own = strategy.plan(number).keep_layers(chosen[client], roles)
            work = Work(down, self._operations_of(client, own), up)
            times[client] = time_of(self._profile(client), work, self.now, self.period)
        self.now += max(one.total for one in times.values())
        return False, {"virtual_seconds": self.now, "virtual_by_client": _rounded(times)}

    def _profile(self, client: str) -> Profile:
        if client not in self._profiles:
            self._profiles[client] = self.profile_of(client)
        return self._profiles[client]

    def _operations_of(self, client: str, plan: Plan) -> float:
        rows, settings = self.rows_of(client), self.client
        total = 0.0
        for phase in plan.steps:
            taken = rows * (settings.local_epochs if phase.epochs is None else phase.epochs)
            if settings.local_steps is not None:
                taken = min(taken, settings.local_steps * min(settings.batch_size, rows))
            total += taken * self.operations(frozenset(phase.trained))
        return total


def _rounded(times: Mapping[str, ClientTime]) -> dict[str, list[float]]:
    return {
        client: [round(one, DIGITS) for one in (time.wait, time.download, time.train, time.upload)]
        for client, time in times.items()
    }


def virtual_time(config: Config, worker: Worker, history: Iterable[Row]) -> list[Any]:
    """The hook of a run with a clock, at the time that its last round ended."""
    clock = config.clock
    if clock.name == "none":
        return []
    known = {} if clock.file is None else read_profiles(Path(clock.file).expanduser())

    @lru_cache(maxsize=256)
    def operations(names: Collection[str]) -> float:
        return operations_per_row(worker, names)

    now = max((row.get("virtual_seconds", 0.0) for row in history), default=0.0)
    return [
        VirtualTime(
            config.client,
            clock.period,
            lambda client: make_profile(clock, config.seed, client, known),
            lambda client: len(worker.rows(client).train),
            operations,
            now,
        )
    ]
