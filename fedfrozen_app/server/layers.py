"""Base of strategies in which each client trains and sends K of the model's layers: its own, or common ones.

A strategy names the rules by which clients choose for themselves (`own_rules`) and defines `choice_for`. This
module has the rules with the same layers for all clients, the check of K, and the record of choices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.config.needs import not_with
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server import base

FOR_ALL = ("fixed", "all", "none")  # rules with the same layers for all clients


@dataclass(frozen=True)
class Settings(base.Settings):
    own_rules: ClassVar[tuple[str, ...]] = ()  # rules with different layers per client

    select: str = setting("fixed", "Which layers a client trains and sends", choices=FOR_ALL)
    top_k: int | None = setting(
        None,
        "K. `null`: a third of the layers",
        least=1,
        instead="must be at least 1; strategy.select=none trains the head alone.",
        needs=not_with("strategy.select", "all", "none", add="strategy.select=fixed"),
    )
    layers: list[int] | None = setting(
        None, "With `select=fixed`: the layers' numbers, from 0. `null`: the last K"
    )
    zero_fill: bool = setting(
        False, "Average a layer over all clients, those that did not send it counting as unchanged"
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        if self.layers is not None and self.select != "fixed":
            raise UserError("strategy.layers names fixed layers: add strategy.select=fixed, or leave it out.")
        return self

    @property
    def each_its_own(self) -> bool:
        return self.select in self.own_rules

    def count_of(self, layers: Sequence[int]) -> int:
        """K, given these layers."""
        return self.top_k or max(1, round(len(layers) / 3))


class LayersTaken(base.PlannedFedAvg):
    """Each client trains and sends K layers, and the parameters outside layers."""

    Settings: type[base.Settings] = Settings

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        self.zero_fill = self.settings.zero_fill
        self._chosen: dict[str, list[int]] = {}
        if not self.layers:
            raise UserError(
                "This model has no layers to choose from: choose strategy=fedavg, or a Transformer."
            )
        if federation.aggregation.name != "mean" and (self.settings.each_its_own or self.zero_fill):
            raise UserError(
                f"aggregation={federation.aggregation.name} compares updates of the same layers, and here a "
                "layer may come from one client alone: choose aggregation=mean, or strategy.select=fixed "
                "without strategy.zero_fill."
            )
        if self.settings.each_its_own:
            self.undecided = "Clients choose their layers in training: the bytes down are at most these."
        self.common = self._common()  # here, to report an invalid K before the first round

    @cached_property
    def layers(self) -> list[int]:
        return layers_of(self.federation.roles, self.federation.roles)

    @property
    def top_k(self) -> int:
        return self.settings.count_of(self.layers)

    def _common(self) -> list[int]:
        """The layers of every client under a fixed rule; otherwise the last K, as a stand-in."""
        count, named = len(self.layers), self.settings.layers
        if self.settings.select in ("all", "none"):
            return self.layers if self.settings.select == "all" else []
        if not 1 <= self.top_k <= count:
            raise UserError(f"strategy.top_k={self.top_k} must lie between 1 and the model's {count} layers.")
        if named is None:
            return self.layers[-self.top_k :]
        if len(set(named)) != self.top_k or not all(0 <= number < count for number in named):
            raise UserError(
                f"strategy.layers={list(named)} must name {self.top_k} different layers "
                f"from 0 to {count - 1}, as strategy.top_k={self.top_k} says."
            )
        return [self.layers[number] for number in sorted(set(named))]

    def plan(self, server_round: int) -> Plan:
        plan = super().plan(server_round)
        return plan if self.settings.each_its_own else plan.keep_layers(self.common, self.federation.roles)

    def client_plan(self, server_round: int) -> Plan:
        return self.plan(server_round).keep_layers(self.common, self.federation.roles)

    def client_metric_names(self) -> tuple[str, ...]:
        return tuple(f"layer_score_{number}" for number, _ in enumerate(self.layers))

    def on_reply(self, client: str, names: Sequence[str]) -> None:
        self._chosen[client] = layers_of(names, self.federation.roles)

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """Add the clients' choices, and the layers' mean scores as one list instead of one metric each."""
        scores = [row.pop(f"layer_score_{n}") for n, _ in enumerate(self.layers) if f"layer_score_{n}" in row]
        chosen = {client: self._chosen[client] for client in row["clients"] if client in self._chosen}
        self._chosen = {}
        return {"selection": chosen, "layers": self.layers} | ({"layer_scores": scores} if scores else {})
