"""`runtime.*`: where the clients run."""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config.needs import only_with
from fedfrozen_app.config.settings import setting


@dataclass
class RuntimeConfig:
    name: str = setting("inprocess", "Set by the file", choices=("inprocess", "ray", "flower", "deployed"))
    runner: str = setting(
        "auto",
        "`sequential` (one client after another), `cohort` (a round's clients at once; in process and with "
        "`ray`) or `auto` (`cohort` on a GPU and, on a CPU, for models under 100,000 parameters; else "
        "`sequential`)",
        choices=("auto", "sequential", "cohort"),
    )
    max_block: int | None = setting(
        None,
        "`cohort`: train at most so many clients at once. `null`: as many as fit",
        least=1,
        needs=only_with("runtime.runner", "auto", "cohort"),
    )
    workers: int | None = setting(
        None,
        "`ray`: into how many parts a round is divided, and how many workers train them. Each holds the "
        "model and the data. `null`: as many as have room when the run starts",
        least=1,
        needs=only_with("runtime", "ray"),
    )
    address: str | None = setting(
        None,
        "`ray`: the cluster's HOST:PORT, or `auto` for the one on this machine. `null`: RAY_ADDRESS, else "
        "Ray is started on this machine for this run",
        needs=only_with("runtime", "ray"),
    )
    cpus_per_worker: int = setting(
        1,
        "`ray`: CPUs of a worker, and its threads where `runtime.threads` is not set",
        least=1,
        needs=only_with("runtime", "ray"),
    )
    gpus_per_worker: float | None = setting(
        None,
        "`ray`: GPUs of a worker, or a share of one. `null`: one where the cluster has any, and `device` is "
        "not `cpu`",
        least=0,
        needs=only_with("runtime", "ray"),
    )
    compile: Any = setting(
        "auto",
        "`cohort` on a GPU: compile the step before it is captured as a CUDA graph. `false` starts at once "
        "and steps slower; `auto` starts so too, and compiles the model's blocks from a plan's second round "
        "on where the rest of the run is long enough to pay for it; `true` compiles the whole step first, "
        "which takes minutes for a deep model and then steps quickest",
        choices=("auto", "true", "false"),
        needs=only_with("runtime.runner", "auto", "cohort"),
    )
    capture: bool = setting(
        True,
        "`sequential` on a GPU: replay one recorded step (a CUDA graph). `false`: step by step",
        needs=only_with("runtime.runner", "auto", "sequential"),
    )
    stack_runs: str = setting(
        "auto",
        "How many runs of one shape (other seeds, partitions, rates) a sweep in process trains together, "
        "in one stacked step: a number, `off`, or `auto` (on a GPU and for models under a million parameters "
        "as many as make 100 clients; on a CPU none)",
    )
    threads: int | None = setting(
        None,
        "torch's threads. `null`: torch chooses; one, where `runner=auto` finds a very small model",
        least=1,
    )
    cpus_per_client: int = setting(
        1, "`flower`: CPUs that Ray reserves for a client", least=1, needs=only_with("runtime", "flower")
    )
    gpus_per_client: float = setting(
        0.0, "`flower`: GPUs, or a share of one", least=0, needs=only_with("runtime", "flower")
    )
    round_timeout: float = setting(
        3600,
        "Seconds to wait for a round's replies",
        above=0,
        needs=only_with("runtime", "flower", "deployed"),
    )
    node_timeout: float = setting(
        300,
        "Seconds to wait for the nodes to appear, and for one that was killed to come back; with `ray`, for "
        "a worker to have room",
        above=0,
        needs=only_with("runtime", "ray", "flower", "deployed"),
    )
    min_nodes: int | None = setting(
        None,
        "Real sites: start once so many are there. `null`: `num_clients`, else 2",
        least=1,
        needs=only_with("runtime", "deployed"),
    )
    server_kit: str | None = setting(
        None,
        "`deployed`: the folder of an operator's kit, of `fedfrozen provision`",
        needs=only_with("runtime", "deployed"),
    )
    view: str | None = setting(
        None,
        "`deployed`: the view of their data that the sites train on. `null`: the only one a site has",
        needs=only_with("runtime", "deployed"),
    )
    approval_timeout: float = setting(
        86400,
        "`deployed`: seconds to wait for sites where a person must approve the run",
        above=0,
        needs=only_with("runtime", "deployed"),
    )
    cache_dir: str | None = setting(
        None,
        "`flower`: where clients keep the arrays they hold. `null`: under `$FLWR_HOME/fedfrozen/cache`",
        needs=only_with("runtime", "flower"),
    )
    cache_gb: float = setting(
        4.0,
        "Largest size of that folder; the least recently used arrays are removed first",
        least=0,
        needs=only_with("runtime", "flower"),
    )
