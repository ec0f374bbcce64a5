"""Replies that are summed where clients train: the instructions for a worker, and what the server receives.

The arrays of such replies are not sent. Instead the worker sends one sum for its part of the round's clients,
and for each reply its names and shapes, its metrics, and whether it is in the sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

Spec = tuple[str, torch.Size, torch.dtype]  # of one array: its name, shape and type


@dataclass(frozen=True)
class SumInstructions:
    """How the server adds the replies of a round to its mean."""

    equal: tuple[str, ...] = ()  # namespaces in which all replies have the same weight
    far_out: float | None = None  # set aside updates with a norm larger than this times the median
    median_norm: float | None = None  # of the last round's updates
    metric_names: tuple[str, ...] = ()  # metrics that clients may send in addition to the request's


@dataclass
class Taken:
    """Totals over all accepted replies, whatever their arrays."""

    examples: float = 0.0
    replies: int = 0


@dataclass
class PartialSums:
    """Σ nᵢuᵢ of some replies, by name, with the weights and Σ nᵢ‖uᵢ‖²."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    examples: float = 0.0
    replies: int = 0


@dataclass
class SummedPart:
    """The replies of a part of the round. `refused` has the reason for each reply that is not in the sum."""

    sums: PartialSums
    refused: Sequence[str | None]
    norms: Sequence[float | None]  # of the updates, if the server compares them with the median
    taken: set[int] = field(default_factory=set)  # the replies that the server has accepted

    def check(self) -> None:
        """The server must have accepted exactly the replies that are in the sum."""
        summed = {number for number, reason in enumerate(self.refused) if reason is None}
        if self.taken != summed:
            raise RuntimeError(
                f"a part of the round has {len(summed)} replies in its sum, and the server accepted "
                f"{len(self.taken)} of its replies"
            )


class SummedReply(Mapping[str, Tensor]):
    """One client's reply in such a part: names, shapes and types of its arrays, without data."""

    def __init__(self, part: SummedPart, number: int, specs: Sequence[Spec]) -> None:
        self.part, self.number, self.specs = part, number, specs

    @cached_property
    def _shapes(self) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in self.specs}

    @property
    def refused(self) -> str | None:
        return self.part.refused[self.number]

    @property
    def norm(self) -> float | None:
        return self.part.norms[self.number]

    def __getitem__(self, name: str) -> Tensor:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.specs)

    def __len__(self) -> int:
        return len(self.specs)
