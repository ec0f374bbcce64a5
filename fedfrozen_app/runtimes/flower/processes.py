"""Flower's processes as child processes: environment, logs and shutdown."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.flower_internals import TASK_POLL_INTERVAL

log = logging.getLogger(__name__)

NO_CLUSTER = "local"  # Ray's word for one of our own
TAIL_LINES = 40
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class SimulationFailed(RunFailed):
    """The run did not complete; the message has the reason and the last log lines."""


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def executable(name: str) -> str:
    """Flower's command `name`, from the current environment, else from the PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise UserError(f"The command '{name}' was not found: pip install 'flwr[simulation]'.")
    return path


def tail(lines: list[str]) -> str:
    return "\n".join(lines[-TAIL_LINES:])


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of every Flower child: a separate home, no telemetry, a fast start."""
    inherited = os.environ
    return {
        **inherited,
        **no_proxy_for_loopback(),
        # Flower starts its helpers by bare name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        TASK_POLL_INTERVAL: "0.5",  # seconds; the default is 1
        # Otherwise Ray joins any cluster that runs on this machine.
        "RAY_ADDRESS": inherited.get("RAY_ADDRESS") or NO_CLUSTER,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",  # each worker logs its device, in similar lines
        # Ray's metrics are not read, and the workers that it starts in advance are never used, because they
        # lack the environment that Flower asks for: seconds of CPU at every start.
        "RAY_enable_metrics_collection": "0",
        "RAY_prestart_worker_first_driver": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def no_proxy_for_loopback() -> dict[str, str]:
    """Flower uses HTTP on 127.0.0.1 and honours HTTP_PROXY: a proxy must not get those requests."""
    current = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, current.split(",")), "127.0.0.1", "localhost"])
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


@dataclass(frozen=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def last_words(self) -> str:
        text = self.log_path.read_text("utf-8", errors="replace")
        return f"--- {self.name}\n{tail(ANSI_COLOUR.sub('', text).splitlines())}"


class Children:
    """Processes that end with the block, together with all that they started.

    Each child leads a process group. Flower's and Ray's processes stay in the group of the child
    they come from, except that a SuperLink in its default isolation mode detaches its SuperExec:
    start it with `--isolation process`, and the SuperExec as one more child.
    """

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self, name: str, command: list[str], home: Path) -> None:
        """Start `command`; its output goes to NAME.log in the working folder."""
        home.mkdir(parents=True, exist_ok=True)
        log_path = self.work_dir / f"{name}.log"
        with log_path.open("wb") as out:
            process = subprocess.Popen(
                [executable(command[0]), *command[1:]],
                env=flower_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in the terminal reaches us alone, and we end the group
            )
        self._children.append(Child(name, process, log_path))

    def pid(self, name: str) -> int:
        return self._named(name).process.pid

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signal a child's whole group, and wait for its end."""
        process = self._named(name).process
        os.killpg(process.pid, number)
        process.wait()

    def _named(self, name: str) -> Child:
        """The newest child of this name: it may have been restarted."""
        return next(child for child in reversed(self._children) if child.name == name)

    def check(self) -> None:
        """Raise if a child has ended already."""
        for child in self._children:
            if child.process.poll() is not None:
                raise SimulationFailed(
                    f"{child.name} ended before the run did, with exit code "
                    f"{child.process.returncode}.\n{child.last_words()}"
                )

    def last_words(self) -> str:
        """The end of every child's log."""
        return "\n".join(child.last_words() for child in self._children)

    def end(self, grace: float = 3) -> None:
        """Terminate the groups; kill remaining processes after the children have ended."""
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            for child in self._children:
                try:
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.debug("%s outlived the grace period", child.name)
        finally:  # also when a second Ctrl-C cuts the grace period short
            self._signal(signal.SIGKILL)
            for child in self._children:
                child.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            try:
                os.killpg(child.process.pid, number)
            except ProcessLookupError:  # the whole group is gone
                continue


@contextmanager
def unwinding_on_hangup() -> Iterator[None]:
    """SIGTERM and SIGHUP end Python without unwinding and would leave Ray running: exit instead."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = []
    if threading.current_thread() is threading.main_thread():
        caught = [
            number
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is signal.SIG_DFL  # keep nohup's and the caller's handlers
        ]
    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
