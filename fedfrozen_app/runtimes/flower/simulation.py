"""Run a Flower app in Flower's Ray simulation and wait until it has really ended.

`flwr run` returns 0 as soon as a run is submitted, however the run ends, and the SuperLink that
it starts is never stopped. Here a run gets a SuperLink of its own, its log is followed to
the last line, a failed run raises, and no process outlives the call.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.runtimes.flower.processes import NO_CLUSTER, Children, unwinding_on_hangup
from fedfrozen_app.runtimes.flower.run_log import failure, kept
from fedfrozen_app.runtimes.flower.superlink import SuperLink
from fedfrozen_app.runtimes.flower.superlink_connection import Scalar

CLUSTER_PATIENCE = 30  # seconds
ASK_CLUSTER = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""


def check_resources(num_supernodes: int, cpus_per_client: float, gpus_per_client: float) -> None:
    """Fail at once, in one sentence. Ray would fail only after everything has started."""
    if num_supernodes < 1:
        raise UserError(f"A simulation needs at least one client, not {num_supernodes}.")
    if cpus_per_client <= 0 or gpus_per_client < 0:
        raise UserError(
            f"runtime.cpus_per_client={cpus_per_client:g} must be above 0, and "
            f"runtime.gpus_per_client={gpus_per_client:g} not below."
        )
    machines = [(node.get("CPU", 0), node.get("GPU", 0)) for node in ray_nodes()]
    if not any(cpus_per_client <= cpus and gpus_per_client <= gpus for cpus, gpus in machines):
        offered = "; ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines)
        raise UserError(
            f"No machine has room for a client with runtime.cpus_per_client={cpus_per_client:g} and "
            f"runtime.gpus_per_client={gpus_per_client:g}: there is one with {offered}. Lower them."
        )


def ray_nodes() -> list[dict[str, float]]:
    """The resources of each machine of the Ray cluster at RAY_ADDRESS; without a cluster, of this one."""
    address = os.environ.get("RAY_ADDRESS") or NO_CLUSTER
    if address == NO_CLUSTER:
        import torch  # takes seconds, and other verbs import this file

        return [{"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}]
    # In a separate process: Ray takes minutes to give up on an address, and has no option for it.
    command = [sys.executable, "-c", ASK_CLUSTER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CLUSTER_PATIENCE)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise UserError(
            f"No Ray cluster answers at RAY_ADDRESS={address}: run this on one of its machines, with the "
            "address that `ray start --head` has named, or unset RAY_ADDRESS."
        ) from error
    return json.loads(done.stdout.splitlines()[-1])


def run_app(
    app_dir: Path,
    run_config: dict[str, Scalar],
    *,
    num_supernodes: int,
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    work_dir: Path,
    start_timeout: float = 120,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run the app on simulated nodes; return when it has completed, raise otherwise.

    `work_dir` receives `run.log` (what the app printed and logged), `superlink.log`,
    `superexec.log` and Flower's home. `on_line` is called, in the caller's thread, with every line
    of the app's log.
    """
    check_resources(num_supernodes, cpus_per_client, gpus_per_client)
    work_dir = work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    federation = {
        "num-supernodes": num_supernodes,
        "client-resources-num-cpus": cpus_per_client,
        "client-resources-num-gpus": gpus_per_client,
    }
    home = work_dir / "flwr_home"
    # Flower considers an app truncated by a full disk as installed.
    shutil.rmtree(home, ignore_errors=True)
    with (
        unwinding_on_hangup(),
        kept(work_dir / "run.log", on_line or (lambda line: None)) as keep,
        Children(work_dir) as children,
    ):
        superlink = SuperLink(children, home, simulation=True, timeout=start_timeout)
        end = superlink.follow(superlink.submit(app_dir, run_config, federation), on_line=keep)
        if end.status != "completed":
            raise failure(end, "" if end.log else children.last_words())
