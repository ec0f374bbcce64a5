"""FedPart: Wang et al., Why Go Full? Elevating Federated Learning Through Partial Network Updates, 2024.

    rounds 1..F                  everything is trained, sent and averaged
    then, in cycles              layer group 1 alone for R rounds, group 2 for R rounds, ..., shallow to
                                 deep, and B rounds of everything before the next cycle

Only a round's trained group is sent; the others keep their values. F = num_rounds is FedAvg.
"""

from dataclasses import dataclass
from typing import Any, Self

from fedfrozen_app.config import setting
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.role import KINDS
from fedfrozen_app.models.select import selected
from fedfrozen_app.server import base
from strategies.schedule import Scheduled, Stage


@dataclass(frozen=True)
class Settings(base.Settings):
    full_rounds: int = setting(5, "F: rounds of full training at the start", least=0)
    group_rounds: int = setting(2, "R: rounds in which one layer group trains alone", least=1)
    between_rounds: int = setting(5, "B: rounds of full training between two cycles", least=0)
    groups: list[list[str]] | None = setting(
        None,
        "The layer groups, in the words of `strategy.stages`. `null`: the stem, each layer, the top; a model "
        "without layers by role",
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        if self.groups is not None and not all(self.groups or [[]]):
            raise UserError("strategy.groups must name at least one group, and none may be empty: [[head]].")
        return self


class FedPart(Scheduled):
    """Full rounds first; then train and send one layer group at a time, shallow to deep."""

    paper = "Wang et al. 2024, NeurIPS"
    Settings = Settings
    key = "strategy.groups"

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        chosen, groups = self.settings, self.settings.groups or self._by_depth()
        first = chosen.full_rounds + 1
        parts = [
            Stage(first + number * chosen.group_rounds, "+".join(words), tuple(words))
            for number, words in enumerate(groups)
        ]
        end = first + len(groups) * chosen.group_rounds
        full = [Stage(1, "full")] if chosen.full_rounds else []
        between = [Stage(end, "full")] if chosen.between_rounds else []
        self.stages, self.cycle = [*full, *parts, *between], (first, end + chosen.between_rounds - 1)
        for stage in parts:  # reports a role that this model lacks before the first round
            selected(stage.train or (), federation.roles, self.key)

    def _by_depth(self) -> list[list[str]]:
        """From the input layers to the head; selectors that match nothing in this model are left out."""
        roles = self.federation.roles
        layers = [f"layer.{number}" for number, _ in enumerate(layers_of(roles, roles))]
        words = ["stem", *layers, "top"] if layers else list(KINDS)
        return [[word] for word in words if selected([word], roles, self.key, strict=False)]
