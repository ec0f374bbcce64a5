"""Decide whether compiling the cohort runner's step pays: `runtime.compile=auto`.

A captured step (CUDA graph) starts at once; a compiled one delays the run first and is faster afterwards. The
first round of every plan is captured, so that there is a result soon; in the second, the number of remaining
rounds decides whether the model's blocks are compiled, which takes seconds. `runtime.compile=true` compiles
the whole step, which takes minutes and is faster still: for runs with enough rounds.
The decision uses no measured time and is stored in checkpoints, so a resumed run takes the same steps as an
uninterrupted one, whatever its machine has compiled before.
"""

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fedfrozen_app.config import Config
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.kept import Kept
from fedfrozen_app.vmap.blocks import Blocks

log = logging.getLogger(__name__)
MODES = {"true": "compiled", "false": "captured"}  # a step's mode, by `runtime.compile`
DEVICES = ("cuda",)  # on a CPU there are no launches to save
# For an H200: what compiling a graph costs with an empty cache, and what a compiled step saves for every
# number that the model's layers output for its examples, forward and backward. Measured with DINOv2-S (12
# layers, 10 clients x 32): 15 s, and 5.9 ms a step, for which this counts 4.4; with the ViT of
# model=vit_cifar (10 x 64) 2.1 ms, for which it counts 3.5 (benchmarks/first_round.py, step_profile.py).
SECONDS_A_GRAPH = 15.0
SECONDS_A_PART = 0.4  # if the whole model is compiled
SAVED = 4e-12


class Trainee(Protocol):
    """The attributes of a worker that this module reads."""

    config: Config
    device: torch.device
    model: nn.Module
    kept: Kept

    @property
    def blocks(self) -> Blocks: ...

    def call_once(self) -> None: ...


@dataclass
class Compiling:
    """The decision for the current plan."""

    plan: str = ""  # digest
    since: int = 0  # the plan's first round
    compiled: bool | None = None  # None: not decided yet

    def mode(self, worker: Trainee, request: TrainRequest, steps: int, examples: int) -> str:
        """The mode of this request's steps: `steps` per round, `examples` in each, padding included."""
        if worker.device.type not in DEVICES:
            return "eager"
        wish = wished(worker.config)
        if wish in MODES:
            return MODES[wish]
        plan = plan_digest(request)
        if plan != self.plan:
            self.plan, self.since, self.compiled = plan, request.round, None
        if self.compiled is None and request.round > self.since:
            rounds = max(worker.config.num_rounds - request.round + 1, 0)
            self._decide(worker, rounds, rounds * steps, examples)
        if not self.compiled:
            return "captured"
        return "blocks" if worker.blocks.repeat else "compiled"

    def undecided(self, worker: Trainee) -> bool:
        """Whether `mode` may still choose another mode for the current plan."""
        automatic = worker.device.type in DEVICES and wished(worker.config) not in MODES
        return automatic and self.compiled is None

    def _decide(self, worker: Trainee, rounds: int, steps: int, examples: int) -> None:
        cost, saved = seconds_to_compile(worker), SAVED * outputs_of(worker) * examples * steps
        self.compiled = saved > cost
        log.info(
            "With %s to go the step is %scompiled (runtime.compile=auto): about %.0f s, and saves %.0f.",
            counted(rounds, "round"),
            "" if self.compiled else "not ",
            cost,
            saved,
        )

    def failed(self) -> None:
        """Note that the compiler failed: this plan's steps are not compiled, in a resumed run either."""
        self.compiled = False

    def state_dict(self) -> dict[str, Any]:
        """The decision for a checkpoint; empty if there was none."""
        return {"plan": self.plan, "since": self.since, "compiled": self.compiled} if self.plan else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plan, self.since = str(state.get("plan", "")), int(state.get("since", 0))
        self.compiled = state.get("compiled")


@dataclass(frozen=True)
class OutputCount:
    """The number of layer outputs of one model, cached with its worker."""

    count: int


def wished(config: Config) -> str:
    """`runtime.compile` as a string: auto, true or false."""
    return str(config.runtime.compile).lower()


def plan_digest(request: TrainRequest) -> str:
    """Digest of the trained names and the algorithm, which determine what a step computes."""
    plan, settings = request.plan, dict(request.settings)
    phases = [[phase.trained, phase.epochs] for phase in plan.phases] if plan.phases else []
    parts = [plan.trained, plan.shared, plan.private, phases, request.algorithm, settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def seconds_to_compile(worker: Trainee) -> float:
    blocks = worker.blocks
    if blocks.repeat:
        return SECONDS_A_GRAPH * blocks.kinds
    return SECONDS_A_GRAPH + SECONDS_A_PART * sum(1 for _ in worker.model.modules())


def outputs_of(worker: Trainee) -> int:
    """How many numbers the model's layers output for one example; a compiled step need not write them."""
    return worker.kept.for_worker(OutputCount, lambda: OutputCount(_count_outputs(worker))).count


def _count_outputs(worker: Trainee) -> int:
    count = 0

    def add(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, torch.Tensor) else 0

    leaves = [part for part in worker.model.modules() if not any(part.children())]
    hooks = [part.register_forward_hook(add) for part in leaves]
    try:
        worker.call_once()
    finally:
        for hook in hooks:
            hook.remove()
    return count


def keep_what_is_compiled(device: torch.device) -> None:
    """Let torch cache compiled code on disk across restarts, in one folder per torch version and device.

    A folder set in the environment takes precedence.
    """
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    name = "-".join([torch.__version__, *what.split()]).replace("/", "_")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(get_flwr_home() / "fedfrozen" / "compiled" / name))
