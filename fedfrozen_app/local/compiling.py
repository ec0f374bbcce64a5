"""When the cohort runner's step is worth compiling: `runtime.compile=auto`.

A recorded step starts at once; a compiled one makes its run wait first and is quicker then. The first round
of every plan is recorded, so that there is a result soon; with its second the rest of the run is weighed.
Then its blocks are compiled, which takes seconds. `runtime.compile=true` compiles the whole step, which takes
minutes and steps quicker still: for those who know that they have the rounds for it.
Nothing that is measured has a say, and what was found goes into checkpoints: a resumed run takes the very
steps of an unbroken one, whatever its machine has compiled before.
"""

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from flwr.supercore.utils import get_flwr_home
from torch import nn

from fedfrozen_app.config import Config
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.models.blocks import Blocks
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
MODES = {"true": "compiled", "false": "captured"}  # of a step, by who wants what
DEVICES = ("cuda",)  # on a CPU a step starts as quickly as it can
# For an H200: what a graph costs where nothing is in the cache, and what a compiled step spares for every
# number that the model's parts put out for its examples, forwards and backwards. Seen with DINOv2-S
# (12 layers, 10 clients x 32): 15 s, and 5.9 ms a step, for which this counts 4.4; with the ViT of
# model=vit_cifar (10 x 64) 2.1 ms, for which it counts 3.5 (benchmarks/first_round.py, step_profile.py).
SECONDS_A_GRAPH = 15.0
SECONDS_A_PART = 0.4  # of a model that is compiled as a whole
SPARED = 4e-12


class Trainee(Protocol):
    """What is looked at here of the resident model."""

    config: Config
    device: torch.device
    model: nn.Module
    outputs: int | None  # of the model's parts for one example, once counted

    @property
    def blocks(self) -> Blocks: ...

    def call_once(self) -> None: ...


@dataclass
class Compiling:
    """What was decided for the plan that trains now."""

    plan: str = ""  # digest
    since: int = 0  # the first round of it
    compiled: bool | None = None  # None: not decided yet

    def mode(self, resident: Trainee, order: Order, steps: int, examples: int) -> str:
        """How to take this order's steps: `steps` a round, `examples` in each of them, padding included."""
        if resident.device.type not in DEVICES:
            return "eager"
        wish = wished(resident.config)
        if wish in MODES:
            return MODES[wish]
        plan = plan_digest(order)
        if plan != self.plan:
            self.plan, self.since, self.compiled = plan, order.round, None
        if self.compiled is None and order.round > self.since:
            rounds = max(resident.config.num_rounds - order.round + 1, 0)
            self._decide(resident, rounds, rounds * steps, examples)
        if not self.compiled:
            return "captured"
        return "blocks" if resident.blocks.repeat else "compiled"

    def undecided(self, resident: Trainee) -> bool:
        """Whether `mode` may yet choose another way for the plan that trains now."""
        automatic = resident.device.type in DEVICES and wished(resident.config) not in MODES
        return automatic and self.compiled is None

    def _decide(self, resident: Trainee, rounds: int, steps: int, examples: int) -> None:
        cost, spared = seconds_to_compile(resident), SPARED * outputs_of(resident) * examples * steps
        self.compiled = spared > cost
        log.info(
            "With %s to go the step is %scompiled (runtime.compile=auto): about %.0f s, and spares %.0f.",
            counted(rounds, "round"),
            "" if self.compiled else "not ",
            cost,
            spared,
        )

    def failed(self) -> None:
        """The compiler: this plan's steps stay as they are, in a resumed run too."""
        self.compiled = False

    def state_dict(self) -> dict[str, Any]:
        """Empty where nothing was ever chosen."""
        return {"plan": self.plan, "since": self.since, "compiled": self.compiled} if self.plan else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plan, self.since = str(state.get("plan", "")), int(state.get("since", 0))
        self.compiled = state.get("compiled")


def wished(config: Config) -> str:
    """What `runtime.compile` asks for: auto, true or false, as a word."""
    return str(config.runtime.compile).lower()


def plan_digest(order: Order) -> str:
    """Of what trains and by which algorithm: with another the step is another."""
    plan, settings = order.plan, dict(order.settings)
    phases = [[phase.trained, phase.epochs] for phase in plan.phases] if plan.phases else []
    parts = [plan.trained, plan.shared, plan.private, phases, order.algorithm, settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def seconds_to_compile(resident: Trainee) -> float:
    blocks = resident.blocks
    if blocks.repeat:
        return SECONDS_A_GRAPH * blocks.kinds
    return SECONDS_A_GRAPH + SECONDS_A_PART * sum(1 for _ in resident.model.modules())


def outputs_of(resident: Trainee) -> int:
    """How many numbers the model's parts put out for one example: what a compiled step need not write."""
    if resident.outputs is None:
        resident.outputs = _count_outputs(resident)
    return resident.outputs


def _count_outputs(resident: Trainee) -> int:
    count = 0

    def add(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, torch.Tensor) else 0

    leaves = [part for part in resident.model.modules() if not any(part.children())]
    hooks = [part.register_forward_hook(add) for part in leaves]
    try:
        resident.call_once()
    finally:
        for hook in hooks:
            hook.remove()
    return count


def keep_what_is_compiled(device: torch.device) -> None:
    """Let torch keep compiled code where it outlives a restart, apart for every torch and device.

    Whoever has named a folder for it is obeyed.
    """
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    name = "-".join([torch.__version__, *what.split()]).replace("/", "_")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(get_flwr_home() / "fedfrozen" / "compiled" / name))
