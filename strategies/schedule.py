"""A freezing schedule as a list of stages: which roles and layers train from which round on.

    stages:                                            plan of round t, by the last stage with from ≤ t:
      - {from: 1, name: warmup}                        everything is trained, sent and averaged
      - {from: 9, name: frozen, freeze: [kernel]}      all but these; or `train: [...]`, these alone

With `cycle: [a, b]` the rounds after b repeat a..b, to the end of the run. FedFrozen (two stages), FedPart
(a cycle of layer groups) and linear probing, then fine-tuning (arXiv 2202.10054: the head, then all) are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from fedfrozen_app.config import setting
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.models.select import selected
from fedfrozen_app.server import base

KEYS = ("from", "name", "train", "freeze")


@dataclass(frozen=True)
class Stage:
    """From round `first` on, train only `train` if it is set, and never what `freeze` names."""

    first: int
    name: str
    train: Sequence[str] | None = None
    freeze: Sequence[str] = ()


class Scheduled(base.PlannedFedAvg):
    """The stage of a round defines what trains; a subclass defines the `stages`."""

    stages: Sequence[Stage] = (Stage(1, "train"),)
    cycle: Sequence[int] | None = None
    key: ClassVar[str] = "strategy.stages"  # the setting that names roles and layers, for messages

    def stage_of(self, server_round: int) -> Stage:
        if self.cycle is not None and server_round > self.cycle[1]:
            first, last = self.cycle
            server_round = first + (server_round - first) % (last - first + 1)
        return [stage for stage in self.stages if stage.first <= server_round][-1]

    def stage(self, server_round: int) -> str:
        return self.stage_of(server_round).name

    def plan(self, server_round: int) -> Plan:
        plan, stage, roles = super().plan(server_round), self.stage_of(server_round), self.federation.roles
        if stage.train is not None:
            alone = set(selected(stage.train, roles, self.key))
            plan = plan.freeze(name for name in plan.trained if name not in alone)
        return plan.freeze(selected(stage.freeze, roles, self.key)) if stage.freeze else plan


@dataclass(frozen=True)
class Settings(base.Settings):
    stages: list[dict[str, Any]] | None = setting(
        None,
        "Each with `from` (its first round), `name`, and `freeze` or `train`: lists of roles (`head`, "
        "`kernel`), layers (`layer.0`), or both (`query.0`). `null`: everything trains in every round",
    )
    cycle: list[int] | None = setting(
        None, "Two rounds: after the second it continues with the first. `null`: the last stage stays"
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        stages = self.parsed()
        if stages[0].first != 1 or any(a.first >= b.first for a, b in pairwise(stages)):
            raise UserError("strategy.stages must begin with from: 1, and each later one in a later round.")
        if self.cycle is not None and not (len(self.cycle) == 2 and 1 <= self.cycle[0] <= self.cycle[1]):
            raise UserError(
                f"strategy.cycle={list(self.cycle)} must be two rounds, the first and the last of what is "
                "repeated, such as [6,18]."
            )
        return self

    def parsed(self) -> list[Stage]:
        return [_stage(number, given) for number, given in enumerate(self.stages or [{"from": 1}], 1)]


def _stage(number: int, given: Mapping[str, Any]) -> Stage:
    if odd := [key for key in given if key not in KEYS]:
        raise UserError(f"Stage {number} of strategy.stages has a key '{odd[0]}': use {', '.join(KEYS)}.")
    first, train, freeze = given.get("from"), given.get("train"), given.get("freeze")
    if type(first) is not int:
        raise UserError(f"Stage {number} of strategy.stages needs from: ROUND, the first round it is for.")
    if train is not None and freeze is not None:
        raise UserError(f"Stage {number} of strategy.stages has both train and freeze: give one of them.")
    for words in (train, freeze):
        if words is not None and (isinstance(words, str) or not isinstance(words, Sequence) or not words):
            raise UserError(f"Stage {number} of strategy.stages: write train and freeze as lists, [head].")
    name = given.get("name") or ("train" if train is None and freeze is None else f"stage {number}")
    return Stage(first, str(name), train, freeze or ())


class Schedule(Scheduled):
    """Train the roles and layers that a list of stages defines, by round."""

    Settings = Settings
    pacings = ("deadline", "buffered")

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        self.stages, self.cycle = self.settings.parsed(), self.settings.cycle
        for stage in self.stages:  # reports a role that this model lacks before the first round
            selected([*(stage.train or ()), *stage.freeze], federation.roles, self.key)
