"""FedFrozen: Du et al., Two-Stage Federated Optimization via Attention Kernel Freezing, arXiv 2605.06446.

    rounds 1..T_w      train all of (Φ, W): Φ = (W_Q, W_K) is the attention kernel, W the rest
    rounds T_w+1..T    Φ stays what the last warm-up round averaged; W goes on, and only W travels

T_w = T is FedAvg; T_w = 0 freezes the kernel as it was initialised; T_w = auto freezes when the clients'
common movement of the kernel has faded beside their disagreement (fedfrozen_app/server/agreement.py).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.roles import KERNEL
from fedfrozen_app.seeds import numpy_generator
from fedfrozen_app.server import base
from fedfrozen_app.server.agreement import Agreement, Rule

log = logging.getLogger(__name__)
AUTO = "auto"
SCOPES = ("qk", "qk+ln1", "train_value_only", "v", "random")
ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Settings(base.Settings):
    warmup_rounds: int | str | None = setting(
        None,
        "Rounds of full training before the freeze, from 0 to `num_rounds`. `null`: a fifth of "
        "`num_rounds`, at least 1 (a resumed run that has frozen stays so). `auto`: until the kernel's "
        "common movement has faded; see [theory](theory.md)",
    )
    warmup_minimum: int | None = setting(
        None,
        "`auto`: freeze no earlier than after so many rounds. `null`: a tenth of `num_rounds`, at least 1",
    )
    warmup_cap: int | None = setting(
        None, "`auto`: freeze at the latest after so many rounds. `null`: it may never freeze"
    )
    warmup_threshold: float = setting(
        Rule.threshold, "`auto`: freeze when agreement between rounds falls below this share of the drift"
    )
    warmup_window: int = setting(
        Rule.window, "`auto`: rounds that agreement and drift are averaged over", least=1
    )
    warmup_patience: int = setting(Rule.patience, "`auto`: rounds in a row that must say so", least=1)
    freeze_scope: str = setting("qk", "What is frozen; see below", choices=SCOPES)

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        shares = {"warmup_rounds": 0.2, "warmup_minimum": 0.1}
        filled = {name: getattr(self, name) for name in (*shares, "warmup_cap")}
        for name, share in shares.items():
            if filled[name] is None:
                filled[name] = min(max(1, round(share * num_rounds)), num_rounds)
        for name, value in filled.items():
            if value is None or (name == "warmup_rounds" and value == AUTO):
                continue
            if not isinstance(value, int):
                raise UserError(f"strategy.{name}={value} is unknown: give a number of rounds, or auto.")
            if not 0 <= value <= num_rounds:
                raise UserError(
                    f"strategy.{name}={value} must lie between 0 and num_rounds={num_rounds}: "
                    "lower it, or raise num_rounds."
                )
        return replace(self, **filled)

    @property
    def rule(self) -> Rule:
        limits = (self.warmup_minimum or 1, self.warmup_cap)
        return Rule(*limits, self.warmup_threshold, self.warmup_window, self.warmup_patience)


class FedFrozen(base.PlannedFedAvg):
    """Train everything during warm-up, then hold the attention kernel fixed."""

    Settings = Settings

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        if not any(role.kind in KERNEL for role in federation.roles.values()):
            raise UserError(
                "This model has no attention kernel to freeze: choose strategy=fedavg, or a Transformer."
            )
        self.agreement = Agreement(self.settings.rule)
        if self.settings.warmup_rounds == AUTO:
            self.undecided = (
                "When auto freezes is found out in training: these are the bytes if it never does."
            )

    def plan(self, server_round: int) -> Plan:
        plan = super().plan(server_round)
        return plan if self.stage(server_round) == "warmup" else plan.freeze(self.frozen)

    def stage(self, server_round: int) -> str:
        last = self.settings.warmup_rounds
        if last == AUTO:
            last = self.agreement.last_round
        return "warmup" if last is None or server_round <= last else "frozen"

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        kernel = [name for name in merged if self.federation.drift_group(self.model, name) == "kernel"]
        if self.settings.warmup_rounds != AUTO or not kernel:
            return {}
        figures = self.agreement.add(
            row, "kernel", {name: merged[name] - self.model[name] for name in kernel}
        )
        if self.stage(row["round"] + 1) == "frozen":
            log.info("The kernel's common movement has faded: it is frozen after round %d.", row["round"])
        return {"warmup": figures}

    def recall(self, row: Row) -> None:
        if "warmup" in row:
            self.agreement.recall(row["round"], row["warmup"])

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
        kept = {
            "qk": lambda role: role.kind not in KERNEL,
            # The norm whose output the kernel reads: in a post-norm model it closes the block before.
            "qk+ln1": lambda role: role.kind not in KERNEL and not role.feeds_attention,
            "train_value_only": lambda role: role.kind in ("value", "head"),
            "v": lambda role: role.kind != "value",
        }[scope]
        return [name for name, role in roles.items() if not kept(role)]

    def _random_matrices(self) -> list[str]:
        """For every matrix of the kernel another attention matrix of its size, with its bias."""
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
