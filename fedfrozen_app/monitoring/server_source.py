"""Metrics of a server and its runs, from the SuperLink and from the runs' folders."""

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import ListNodesRequest, ListRunsRequest
from fedfrozen_app.monitoring.families import SERVER, Collected
from fedfrozen_app.monitoring.machine import Machine
from fedfrozen_app.monitoring.run_numbers import RunNumbers
from fedfrozen_app.sites.control import control

PATIENCE = 3.0  # seconds for an answer of the SuperLink
SHOWN = 5  # runs: active ones, and the last ones
MISSED = 2  # missed heartbeats after which Flower counts a node as gone: `online_until` is this many ahead


@dataclass
class ServerSource:
    folder: Path
    machine: Machine
    _runs: dict[int, RunNumbers] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "ServerSource":
        return cls(folder, Machine({"server": folder}, {"server": folder / "server.crt"}))

    def collect(self) -> Collected:
        found = Collected(SERVER)
        sites = {path.stem: path for path in sorted((self.folder / "admitted").glob("*.crt"))}
        folders = {"server": self.folder} | {run.name: run.folder for run in self._runs.values() if run.going}
        self.machine.certificates = {"server": self.folder / "server.crt"} | sites
        self.machine.folders = folders
        self.machine.collect(found)
        found.add("fedfrozen_server_up", is_running(self.folder / "nginx.pid"), part="proxy")
        found.add("fedfrozen_server_up", self._ask(found), part="superlink")
        for run in self._runs.values():
            run.collect(found)
        return found

    def _ask(self, found: Collected) -> bool:
        """Query the SuperLink for nodes and runs. Returns whether it answers."""
        try:
            with control(self.folder, PATIENCE) as client:
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
                runs = client.ListRuns(ListRunsRequest()).run_dict
        except (httpx.HTTPError, UserError, OSError):
            return False
        for node in nodes:
            if node.status == "unregistered" or not node.name:
                continue
            found.add("fedfrozen_server_site_online", node.status == "online", site=node.name)
            if (silence := silence_of(node)) is not None:
                found.add("fedfrozen_server_site_silence_seconds", silence, site=node.name)
        self._follow(runs)
        states = Counter(run.status.status for run in runs.values())
        for state in ("pending", "starting", "running"):
            found.add("fedfrozen_server_runs", states[state], state=state)
        return True

    def _follow(self, runs: Mapping[int, Any]) -> None:
        going = {number for number, run in runs.items() if run.status.status != "finished"}
        shown = sorted(runs, key=lambda number: (number in going, runs[number].pending_at))[-SHOWN:]
        kept = {number: self._runs[number] for number in shown if number in self._runs}
        for number in shown:
            if number not in kept and (made := run_of(runs[number])) is not None:
                kept[number] = made
            if number in kept:
                kept[number].going = number in going
        self._runs = dict(_latest_of_each(kept))


def _latest_of_each(runs: Mapping[int, RunNumbers]) -> Iterator[tuple[int, RunNumbers]]:
    """The latest Flower run of each run: a resumed run is several runs for Flower."""
    names = {run.name: number for number, run in runs.items()}
    return ((number, run) for number, run in runs.items() if names[run.name] == number)


def run_of(run: Any) -> RunNumbers | None:
    """The run as submitted to Flower; None for a census or a study."""
    settings = {key: value.string for key, value in run.override_config.items()}
    folder = settings.get("output-dir", "")
    if not folder or settings.get("census") or settings.get("survival"):
        return None
    words = dict(word.partition("=")[::2] for word in shlex.split(settings.get("overrides", "")))
    rounds = words.get("num_rounds", "")
    name = words.get("run_id") or f"flower-{run.run_id}"
    return RunNumbers(name, Path(folder), int(rounds) if rounds.isdecimal() else None)


def silence_of(node: Any) -> float | None:
    """Seconds since the last heartbeat; None for a node that never sent one."""
    if not node.online_until:
        return None
    last = node.online_until - MISSED * node.heartbeat_interval
    return max(0.0, time.time() - last)


def is_running(path: Path) -> bool:
    """Whether the process of this pid file exists."""
    try:
        os.kill(int(path.read_text()), 0)
    except (OSError, ValueError) as error:
        return isinstance(error, PermissionError)
    return True
