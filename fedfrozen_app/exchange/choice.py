"""Each client takes part of the plan: K of its layers, by scores of its own data or by chance.

A rule says what a layer scores; how many are taken, the check of a reply, and a choice that differential
privacy covers are the same for every rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.models.roles import Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """Built from the order's settings. A rule that looks at no data overrides `pick`, the others `scores`."""

    top_k: int
    examples: int = 256  # rows that are scored at most
    looks_at_data: ClassVar[bool] = True
    # What it means when all scores are 0, for the log.
    all_zero_means: ClassVar[str] = "nothing of what its rule looks for is there"

    def rows_to_score(self, count: int) -> int:
        """How many of a client's `count` rows are looked at."""
        return min(self.examples, count)

    def check(self, resident: Any) -> None:
        """A `UserError` where the rule cannot score this run's model and data, whatever the rows hold."""

    def scores(self, resident: Any, rows: "Tensor", *, private: bool = False) -> "Tensor":
        """(rows, layers, parts): how much each layer matters to each of these rows of the resident's table.

        With `private` nothing may be refused for what is in the rows: everybody would see it.
        """
        raise NotImplementedError

    def figures(self, scores: "Tensor") -> dict[str, float]:
        """What of the mean scores, (layers, parts), goes with the reply, as figures."""
        return {}

    def pick(self, count: int, generator: torch.Generator) -> tuple[int, ...]:
        """K of `count` layers by chance, for a rule that looks at no data."""
        return tuple(sorted(torch.randperm(count, generator=generator)[: self.top_k].tolist()))

    def part(self, plan: Plan, picked: Iterable[int], roles: Mapping[str, Role]) -> Plan:
        """The plan with the picked layers alone; what belongs to no layer stays as it is."""
        layers = layers_of(plan.trained, roles)
        return plan.keep_layers([layers[number] for number in picked], roles)

    def plan_taken(self, plan: Plan, names: Iterable[str], roles: Mapping[str, Role]) -> Plan:
        """The part that a reply took; `ValueError`, as the rest of a sentence, if these names are none."""
        chosen = layers_of(names, roles)
        if len(chosen) != self.top_k:
            raise ValueError(f"chose {len(chosen)} layers where {self.top_k} were asked for")
        return plan.keep_layers(chosen, roles)  # whole layers, and what belongs to none


def top_k(scores: "Tensor", k: int) -> tuple[int, ...]:
    """The positions of the K largest scores, in ascending order; of equal scores the higher layer."""
    values = scores.tolist()
    ranked = sorted(range(len(values)), key=lambda layer: (values[layer], layer), reverse=True)
    return tuple(sorted(ranked[:k]))
