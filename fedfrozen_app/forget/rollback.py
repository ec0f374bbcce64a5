"""Determines where a run must restart so that its model contains nothing of a client, or why it cannot."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted, quoted
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.folders import sites_file
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.files.rows import Row, first_rounds, read_rows
from fedfrozen_app.launch import finished


@dataclass(frozen=True)
class Rollback:
    run: Path
    client: str
    summary: dict[str, Any]
    rows: list[Row]
    first: int  # the client's first round
    start: Path | None  # the checkpoint to restart from; None: the beginning

    @property
    def start_round(self) -> int:
        return 0 if self.start is None else int(self.start.name)

    @property
    def again(self) -> list[Row]:
        """The rounds to rerun."""
        return [row for row in self.rows if row["round"] > self.start_round]

    @property
    def excluded(self) -> list[str]:
        """This client, and the clients that the run already excluded."""
        before = self.summary["config"].get("exclude_clients") or []
        return sorted({*map(str, before if isinstance(before, list) else [before]), self.client})

    @property
    def left(self) -> set[str]:
        """The remaining clients: registered sites, and all clients that took part."""
        sites = read_object(sites_file(self.run)) or {}
        return {*map(str, sites.values()), *first_rounds(self.rows)} - {*self.excluded}

    def cost(self) -> str:
        """The estimated cost of rerunning the rounds, from what they took."""
        rows = self.again
        seconds = sum(row.get("seconds", {}).get("total", 0.0) for row in rows)
        up, down = (sum(row.get(key, 0) for row in rows) / 1e6 for key in ("bytes_up", "bytes_down"))
        place = "from the beginning" if self.start is None else f"after round {self.start_round}"
        return (
            f"Client {self.client} first took part in round {self.first}: the run restarts {place} without "
            f"it. The first time, {counted(len([row for row in rows if row['round']]), 'round')} from there "
            f"took {seconds:,.1f} s and sent {up:,.1f} MB up, {down:,.1f} MB down; they take as much again."
        )


def plan_rollback(run: Path, name: str, *, from_start: bool = False) -> Rollback:
    """`UserError` if the run cannot continue as if the client had never taken part."""
    summary = finished(run)
    config, rows = summary["config"], read_rows(run)
    client = client_called(name, run, rows)
    firsts = first_rounds(rows)
    if client not in firsts:
        raise UserError(
            f"Client {client} took part in no round of {run}: its model holds nothing of it, and no round "
            "needs to be run again."
        )
    check_allowed(run, config, client, rows)
    first = firsts[client]
    start = None if from_start else _start(run, config, first)
    if start is not None:
        check_own_parts(run, config, client)
    return Rollback(run, client, summary, rows, first, start)


def client_called(name: str, run: Path, rows: list[Row]) -> str:
    """The client's name in the run: `name` may be that of its group, such as a hospital in a column."""
    groups = read_object(run / "clients.json") or {}
    shown = {str(about.get("name")): number for number, about in groups.items() if isinstance(about, dict)}
    sites = read_object(sites_file(run)) or {}
    known = {*groups, *map(str, sites.values()), *first_rounds(rows)}
    if name in known:
        return name
    if name in shown:
        return shown[name]
    some = ", ".join(quoted(one, 60) for one in sorted(known, key=lambda one: (len(one), one))[:12])
    raise UserError(
        f"{run} has no client {quoted(name, 60)}: give one of {some}{', ...' if len(known) > 12 else ''}."
    )


def check_allowed(run: Path, config: Mapping[str, Any], client: str, rows: list[Row]) -> None:
    if config["privacy"]["name"] != "none":
        raise UserError(
            f"{run} is private: {bound(config, rows)} Running its rounds again would spend the other "
            f"clients' privacy a second time: if it must be, start a run with exclude_clients=[{client}]."
        )
    if config["secure_aggregation"]["name"] != "off":
        raise UserError(
            f"{run} summed masked updates, and the same rounds without client {client} would show its update "
            f"as the difference of two sums: start a run with another seed and exclude_clients=[{client}]."
        )


def check_own_parts(run: Path, config: Mapping[str, Any], client: str) -> None:
    """`UserError` if clients keep state that cannot be rolled back."""
    state = checkpoint.newest_state(run) or {}
    if config["runtime"]["name"] not in ("inprocess", "ray") and (state.get("hooks") or {}).get("private"):
        raise UserError(
            f"Clients of {run} keep parts of the model for themselves, which no checkpoint of the server can "
            f"take back: start a new run with exclude_clients=[{client}] and fresh parts."
        )


def bound(config: Mapping[str, Any], rows: list[Row]) -> str:
    """The bound of differential privacy on a forgotten client's influence, without rerunning rounds."""
    spent = max((row.get("epsilon_max", 0.0) for row in rows), default=0.0)
    delta = max((row.get("delta", 0.0) for row in rows), default=0.0)
    unit = config["privacy"]["unit"]
    return (
        f"its model differs from one without any single {unit} of a client by at most epsilon={spent:.3g} "
        f"(delta={delta:.0e}), which bounds the influence of one {unit}, not of all rows of a client."
    )


def _start(run: Path, config: Mapping[str, Any], first: int) -> Path | None:
    """The last checkpoint before the round `first`, in this run or the one that it was forked from."""
    source, settings = run, config
    while (fork := settings.get("from")) is not None and first <= int(Path(fork).name):
        source = Path(fork).parents[1]
        settings = finished(source)["config"]
    number = checkpoint.last_before(source / "checkpoints", first)
    if number is not None:
        return source / "checkpoints" / str(number)
    if fork is not None and Path(fork).is_dir():
        return Path(fork)
    if fork is None and first == 1:
        return None  # the initial model, which seed and settings determine
    raise UserError(
        f"{source} keeps no checkpoint before round {first}, the client's first (checkpoint.rollback=true "
        "keeps them): add --from-start to run all rounds again without it."
    )
