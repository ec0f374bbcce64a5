"""Simulate the duration of rounds on the clients' own machines and links."""

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
from fedfrozen_app.server.live_pacing import live_pacing
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.pacing import Pacing

DIGITS = 6  # decimals of seconds in a round's row


@dataclass
class ClientTimes:
    """Computes the duration of each client's requests."""

    client: ClientConfig
    period: float
    profile_of: Callable[[str], Profile]
    rows_of: Callable[[str], int]  # number of a client's training rows
    operations: Callable[[frozenset[str]], float]  # per row, if these names train
    _profiles: dict[str, Profile] = field(default_factory=dict)
    _phases: dict[Plan, list[tuple[int, float]]] = field(default_factory=dict)  # epochs, operations per row

    def of(
        self, client: str, plan: Plan, down: int, up: int, asked_at: float, most: int | None = None
    ) -> ClientTime:
        """The times of a request. `most`: the maximum number of local steps in each phase."""
        if client not in self._profiles:
            self._profiles[client] = self.profile_of(client)
        work = Work(down, self._operations_of(client, plan, most), up)
        return time_of(self._profiles[client], work, asked_at, self.period)

    def steps(self, client: str, plan: Plan) -> int:
        """The local steps of the longest phase."""
        batches = -(-self.rows_of(client) // self.client.batch_size)
        steps = max(epochs * batches for epochs, _ in self._phases_of(plan))
        return min(steps, self.client.local_steps or steps)

    def _operations_of(self, client: str, plan: Plan, most: int | None) -> float:
        rows, settings = self.rows_of(client), self.client
        limits = [limit for limit in (settings.local_steps, most) if limit is not None]
        total = 0.0
        for epochs, operations in self._phases_of(plan):
            steps = min(limits, default=None)
            total += operations * rows_taken(rows, settings.batch_size, epochs, steps)
        return total

    def _phases_of(self, plan: Plan) -> list[tuple[int, float]]:
        if plan not in self._phases:
            usual = self.client.local_epochs
            self._phases[plan] = [
                (usual if phase.epochs is None else phase.epochs, self.operations(frozenset(phase.trained)))
                for phase in plan.steps
            ]
        return self._phases[plan]


def rows_taken(rows: int, batch: int, epochs: int, steps: int | None) -> int:
    """The number of rows in `steps` steps, or in all; an epoch's last batch may be smaller."""
    if steps is None:
        return rows * epochs
    whole, more = divmod(steps, -(-rows // batch))
    return min(rows * epochs, whole * rows + min(more * batch, rows))


@dataclass
class VirtualTime:
    """A hook for synchronous rounds: a round lasts until its slowest client has answered. The server's own
    work takes no time."""

    times: ClientTimes
    now: float = 0.0

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        sent: Mapping[str, list[int]] = row.pop("bytes_by_client", {})
        if not sent:
            return False, {"virtual_seconds": self.now}
        number, roles = row["round"], strategy.federation.roles
        plan, chosen = strategy.client_plan(number), row.get("selection", {})
        times = {}
        for client, (down, up) in sent.items():
            own = plan
            if client in chosen:  # this client's part of the plan
                own = strategy.plan(number).keep_layers(chosen[client], roles)
            times[client] = self.times.of(client, own, down, up, self.now)
        self.now += max(one.total for one in times.values())
        return False, {"virtual_seconds": self.now, "virtual_by_client": _rounded(times)}


@dataclass
class PacedTime:
    """A hook for paced rounds: their events determine the virtual time; the initial model's row has none."""

    pacing: Pacing

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        return False, {} if "virtual_seconds" in row else {"virtual_seconds": self.pacing.pacer.now}


def _rounded(times: Mapping[str, ClientTime]) -> dict[str, list[float]]:
    return {
        client: [round(one, DIGITS) for one in (time.wait, time.download, time.train, time.upload)]
        for client, time in times.items()
    }


def client_times(config: Config, worker: Worker) -> ClientTimes:
    clock = config.clock
    known = {} if clock.file is None else read_profiles(Path(clock.file).expanduser())

    @lru_cache(maxsize=256)
    def operations(names: Collection[str]) -> float:
        return operations_per_row(worker, names)

    return ClientTimes(
        config.client,
        clock.period,
        lambda client: make_profile(clock, config.seed, client, known),
        lambda client: len(worker.rows(client).train),
        operations,
    )


def virtual_time(config: Config, worker: Worker, history: Iterable[Row]) -> tuple[list[Any], Pacing | None]:
    """The hooks of a run with a clock, starting at the end of its last round; and its pacing, if rounds do
    not wait for all clients."""
    if config.clock.name == "none":
        return [], live_pacing(config)
    times = client_times(config, worker)
    now = max((row.get("virtual_seconds", 0.0) for row in history), default=0.0)
    masked = config.secure_aggregation.name == "on"
    pacer = make_pacer(config.pacing, config.seed, config.participation, masked=masked)
    if pacer is None:
        return [VirtualTime(times, now)], None
    pacer.now = now
    pacing = Pacing(pacer, times)
    return [PacedTime(pacing)], pacing
