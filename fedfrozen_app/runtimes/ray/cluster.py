"""Connect to Ray, and find out how many workers have room there.

Ray's own messages for a wrong address come after minutes, and those for missing resources never: a worker
without room waits silently. Both are checked here first.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import counted, format_error

log = logging.getLogger(__name__)
CONNECT_PATIENCE = 5.0  # seconds
ATTEMPTS = 3  # to start Ray
RAY_ADDRESS = "RAY_ADDRESS"
START = "start one with `ray start --head`, or leave runtime.address out, which starts Ray on this machine"


@dataclass(frozen=True)
class Room:
    """The resources of a worker, and how many workers fit on the cluster now."""

    cpus: int
    gpus: float
    fitting: int

    @property
    def size(self) -> str:
        each = counted(self.cpus, "CPU")
        return f"{each} and {self.gpus:g} of a GPU each" if self.gpus else f"{each} each"


def connect_to_ray(config: Config) -> None:
    """Join the cluster that the configuration or RAY_ADDRESS names; without one, start Ray on this machine,
    which ends with this process."""
    address = address_of(config)
    if ray.is_initialized():
        return
    unlogged: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    with own_signals():
        if address is None:
            add_to_path(sys.path)  # workers import this package from the same path as this process
            start_here(unlogged)
            return
        try:
            check_answers(address)
            ray.init(address, **unlogged)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"No Ray cluster answers at runtime.address={address}: {START}.") from error


def start_here(unlogged: dict[str, Any]) -> None:
    """Ray gives its own processes 30 s to start. On a busy machine the next attempt finds them in memory."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init("local", include_dashboard=False, **unlogged)
            return
        except Exception as error:  # Ray raises no specific class
            ray.shutdown()
            if attempt == ATTEMPTS:
                raise RunFailed(
                    f"Ray could not be started on this machine ({format_error(error)}): look whether it is "
                    "busy or its disk full, or use runtime=inprocess."
                ) from error
            log.warning("Ray did not start in time: starting it once more.")


@contextmanager
def own_signals() -> Iterator[None]:
    """On exit, restore our handler of SIGTERM, by which a scheduler ends a run: Ray replaces it."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)


def address_of(config: Config) -> str | None:
    return config.runtime.address or os.environ.get(RAY_ADDRESS) or None


def add_to_path(places: list[str]) -> None:
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [place for place in places if place and place not in known]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), *more])


def check_answers(address: str) -> None:
    """`OSError` or `ValueError` if nothing listens at the address. `auto` is looked up first."""
    if address == "auto":
        address = head_of_this_machine()
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address} is not an address HOST:PORT")
    with socket.create_connection((host, int(port)), CONNECT_PATIENCE):
        pass


def head_of_this_machine() -> str:
    from ray._private import services

    found = services.canonicalize_bootstrap_address("auto")
    if found is None:
        raise ConnectionError("no Ray process runs on this machine")
    return str(found)


def room_for(config: Config) -> Room:
    """The resources of one worker, and how many fit; a `UserError` if none does."""
    runtime = config.runtime
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus_there = sum(node.get("GPU", 0) for node in nodes)
    gpus = runtime.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if gpus_there and config.device != "cpu" else 0.0
    if config.device == "cuda" and not gpus:
        why = "runtime.gpus_per_worker=0" if gpus_there else "no machine of Ray has one"
        raise UserError(
            f"device=cuda needs workers with a GPU, and {why}: use device=cpu, or let each worker have one."
        )
    cpus = runtime.cpus_per_worker
    fitting = sum(_fitting(node, cpus, gpus) for node in nodes)
    if not fitting:
        offered = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise UserError(
            f"No machine of Ray has room for a worker with runtime.cpus_per_worker={cpus} and "
            f"runtime.gpus_per_worker={gpus:g}: there is one with {offered}. Lower them."
        )
    return Room(cpus, gpus, fitting)


def _fitting(node: dict[str, float], cpus: float, gpus: float) -> int:
    by_cpu = int(node.get("CPU", 0) // cpus)
    return min(by_cpu, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu
