"""FedFrozen: Du et al., Two-Stage Federated Optimization via Attention Kernel Freezing, arXiv 2605.06446.

    rounds 1..T_w      train all of (Φ, W): Φ = (W_Q, W_K) is the attention kernel, W the rest
    rounds T_w+1..T    Φ stays what the last warm-up round averaged; W continues to train, and only W is sent

T_w = T is FedAvg; T_w = 0 freezes the kernel as it was initialised; T_w = auto freezes when the model has
stopped learning, and the clients' common movement of the kernel has become small relative to their
disagreement (fedfrozen_app/server/agreement.py).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.select import selected
from fedfrozen_app.server import base, warmup
from fedfrozen_app.server.agreement import Agreement
from fedfrozen_app.server.warmup import AUTO, FROZEN, WARMUP

log = logging.getLogger(__name__)
# What each scope freezes, as selectors of models/select.py. `qk+ln1` includes the norms whose output the
# kernel reads: in a post-norm model they end the previous block.
SCOPES: dict[str, list[str]] = {
    "qk": ["kernel"],
    "qk+ln1": ["kernel", "attention_norm"],
    "train_value_only": ["embedding", "kernel", "output", "mlp", "norm"],
    "v": ["value"],
    "random": [],
}
ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Settings(warmup.Settings):
    freeze_scope: str = setting("qk", "What is frozen; see below", choices=tuple(SCOPES))


class FedFrozen(base.PlannedFedAvg):
    """Train everything during a warm-up, then hold the attention kernel fixed."""

    paper = "Du et al. 2026, arXiv 2605.06446"
    Settings = Settings
    pacings = ("deadline", "buffered")
    metric_names = ("warmup",)
    curves = (warmup.CURVE,)

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        if not any(role.kind in KERNEL for role in federation.roles.values()):
            raise UserError(
                "This model has no attention kernel to freeze: choose strategy=fedavg, or a Transformer."
            )
        self.agreement = Agreement(self.settings.rule)
        if self.settings.warmup_rounds == AUTO:
            self.undecided = warmup.UNDECIDED

    @classmethod
    def needs_versions(cls, settings: Any) -> str:
        return warmup.COMPARES_ROUNDS if settings.warmup_rounds == AUTO else ""

    def plan(self, server_round: int) -> Plan:
        plan = super().plan(server_round)
        return plan if self.stage(server_round) == WARMUP else plan.freeze(self.frozen)

    def stage(self, server_round: int) -> str:
        last = self.settings.warmup_rounds
        if last == AUTO:
            alone = self.federation.client.local_steps == 1  # then no client drifts within a round
            last = None if alone else self.agreement.last_round
        return WARMUP if last is None or server_round <= last else FROZEN

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        kernel = [name for name in merged if self.federation.drift_group(self.model, name) == "kernel"]
        if self.settings.warmup_rounds != AUTO or not kernel:
            return {}
        moved = {name: merged[name] - self.model[name] for name in kernel}
        metrics = self.agreement.add(row, "kernel", moved)
        if self.stage(row["round"] + 1) == FROZEN:
            log.info("The kernel's common movement has faded: it is frozen after round %d.", row["round"])
        return {"warmup": metrics}

    def recall(self, row: Row) -> None:
        self.agreement.recall(row, frozen=row.get("stage") == FROZEN)

    def state(self) -> dict[str, Tensor]:
        return self.agreement.direction

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.agreement.direction = dict(state)

    @cached_property
    def frozen(self) -> list[str]:
        """The names that the scope freezes after the warm-up."""
        roles, scope = self.federation.roles, self.settings.freeze_scope
        if scope == "random":
            return self._random_matrices()
        return selected(SCOPES[scope], roles, "strategy.freeze_scope", strict=False)

    def _random_matrices(self) -> list[str]:
        """For every matrix of the kernel, another attention matrix of the same size, with its bias."""
        roles = self.federation.roles
        attention = [n for n, role in roles.items() if role.kind in ATTENTION and self.model[n].ndim > 1]
        generator = numpy_generator(self.federation.seed, "random freeze")
        drawn: list[str] = []
        for size in sorted({self.model[name].numel() for name in attention}):
            pool = [name for name in attention if self.model[name].numel() == size]
            count = sum(roles[name].kind in KERNEL for name in pool)
            drawn += [pool[i] for i in sorted(generator.choice(len(pool), size=count, replace=False))]
        modules = tuple(name.rpartition(".")[0] + "." for name in drawn)
        return [name for name in roles if name.startswith(modules)]
