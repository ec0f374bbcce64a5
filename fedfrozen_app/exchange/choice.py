"""Each client takes part of the plan: K of its layers, by scores of its own data or by chance.

A rule defines the scores of layers; how many are taken, the check of a reply, and a choice that differential
privacy covers are the same for every rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedfrozen_app.core.deprecated import Alias, adopt_old_names
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.exchange.role import Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """Built from the request's settings. A rule that uses no data overrides `pick`, the others `scores`."""

    top_k: int
    examples: int = 256  # rows that are scored at most
    looks_at_data: ClassVar[bool] = True
    # What it means when all scores are 0, for the log.
    all_zero_means: ClassVar[str] = "nothing of what its rule looks for is there"

    def rows_to_score(self, count: int) -> int:
        """How many of a client's `count` rows are looked at."""
        return min(self.examples, count)

    def check(self, worker: Any) -> None:
        """A `UserError` where the rule cannot score this run's model and data, whatever the rows hold."""

    def scores(self, worker: Any, rows: "Tensor", *, private: bool = False) -> "Tensor":
        """(rows, layers, parts): how much each layer matters to each of these rows of the worker's table.

        With `private` nothing may be refused because of the rows' content: that would reveal it.
        """
        raise NotImplementedError

    def metrics(self, scores: "Tensor") -> dict[str, float]:
        """What of the mean scores, (layers, parts), is sent with the reply, as metrics."""
        return {}

    figures = Alias("metrics")  # its old name, for one release

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_old_names(cls)

    def pick(self, count: int, generator: torch.Generator) -> tuple[int, ...]:
        """K of `count` layers by chance, for a rule that looks at no data."""
        return tuple(sorted(torch.randperm(count, generator=generator)[: self.top_k].tolist()))

    def part(self, plan: Plan, picked: Iterable[int], roles: Mapping[str, Role]) -> Plan:
        """The plan with the picked layers alone; names outside the layers do not change."""
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
