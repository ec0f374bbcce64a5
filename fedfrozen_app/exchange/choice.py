"""Each client trains a part of the plan: K of its layers, chosen by scores on its own data or at random.

A rule defines the scores of layers; the number of layers, the check of a reply, and choices covered by
differential privacy are the same for every rule.
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
    """A rule, built from the request's settings. Rules without data override `pick`, others `scores`."""

    top_k: int
    examples: int = 256  # maximum number of scored rows
    looks_at_data: ClassVar[bool] = True
    # Why all scores may be 0, for the log.
    all_zero_means: ClassVar[str] = "nothing of what its rule looks for is there"

    def rows_to_score(self, count: int) -> int:
        """How many of a client's `count` rows are scored."""
        return min(self.examples, count)

    def check(self, worker: Any) -> None:
        """Raise a `UserError` if the rule cannot score this run's model and data, for any rows."""

    def scores(self, worker: Any, rows: "Tensor", *, private: bool = False) -> "Tensor":
        """(rows, layers, parts): how much each layer matters to each of these rows of the worker's table.

        With `private`, raise no error that depends on the rows' content: it would reveal the content.
        """
        raise NotImplementedError

    def metrics(self, scores: "Tensor") -> dict[str, float]:
        """The metrics sent with the reply, from the mean scores, (layers, parts)."""
        return {}

    figures = Alias("metrics")  # its old name, for one release

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_old_names(cls)

    def pick(self, count: int, generator: torch.Generator) -> tuple[int, ...]:
        """K random layers out of `count`, for a rule that uses no data."""
        return tuple(sorted(torch.randperm(count, generator=generator)[: self.top_k].tolist()))

    def part(self, plan: Plan, picked: Iterable[int], roles: Mapping[str, Role]) -> Plan:
        """The plan with only the picked layers; names outside the layers do not change."""
        layers = layers_of(plan.trained, roles)
        return plan.keep_layers([layers[number] for number in picked], roles)

    def plan_taken(self, plan: Plan, names: Iterable[str], roles: Mapping[str, Role]) -> Plan:
        """The part of the plan with a reply's names; `ValueError`, as the rest of a sentence, if invalid."""
        chosen = layers_of(names, roles)
        if len(chosen) != self.top_k:
            raise ValueError(f"chose {len(chosen)} layers where {self.top_k} were asked for")
        return plan.keep_layers(chosen, roles)  # whole layers, and names outside layers


def top_k(scores: "Tensor", k: int) -> tuple[int, ...]:
    """The positions of the K largest scores, in ascending order; in a tie, the higher layer."""
    values = scores.tolist()
    ranked = sorted(range(len(values)), key=lambda layer: (values[layer], layer), reverse=True)
    return tuple(sorted(ranked[:k]))
