"""Adapter rules, which aggregate clients' adapters; without one, adapters are parameters like any others.

A rule gets the accepted replies of a round, each with its weight in the mean, and at the round's end the
merged model. It returns further changes: starting values of adapters, and merged deltas, which are added to
the frozen weights (adapters/merged_deltas.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.merged_deltas import is_merged_delta, merged_delta_name
from fedfrozen_app.config import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError


@dataclass
class Taken:
    """For one projection: the factors of the clients that sent both, as received, and their weights."""

    outer: list[Tensor] = field(default_factory=list)  # Bᵢ
    inner: list[Tensor] = field(default_factory=list)  # Aᵢ
    weights: list[float] = field(default_factory=list)

    def stacked(self, scale: float) -> tuple[Tensor, Tensor]:
        """[s·p₁B₁ … s·pₙBₙ] and [A₁; …; Aₙ]: their product is s·Σ pᵢBᵢAᵢ."""
        total = sum(self.weights)
        shares = [scale * weight / total for weight in self.weights]
        parts = [share * outer for share, outer in zip(shares, self.outer, strict=True)]
        return torch.cat(parts, dim=1), torch.cat(self.inner)


class AdapterRule:
    """Plain averaging, and the base of all rules."""

    # Why it needs individual replies, as a verb ("stacks"); empty: their mean is enough.
    one_by_one: ClassVar[str] = ""
    moves_base: ClassVar[bool] = False  # whether it adds to the frozen weights

    def __init__(self, scale: float = 1.0, seed: int = 0, ranks: Mapping[str, int] | None = None) -> None:
        self.scale, self.seed, self.ranks = scale, seed, dict(ranks or {})
        self._taken: dict[str, Taken] = {}

    def frozen(self, names: Iterable[str]) -> list[str]:
        """The exchanged names that the rule keeps frozen, whatever the strategy plans."""
        return []

    def constant(self, names: Iterable[str]) -> list[str]:
        """The names that a round shares without changing them."""
        return []

    def begin(self) -> None:
        """Called at the start of a round."""
        self._taken = {}

    def take(self, client: str, sent: Mapping[str, Tensor], weight: float) -> None:
        """Called with each accepted reply, if the rule needs them: copies, padded to the model's rank."""
        rank = self.ranks.get(client)
        for path in lora.adapted(sent):
            pair = [f"{path}.{end}" for end in (lora.B, lora.A)]
            if pair[0] not in sent:
                continue
            outer, inner = (sent[n] if rank is None else lora.narrowed(n, sent[n], rank) for n in pair)
            taken = self._taken.setdefault(path, Taken())
            taken.outer.append(outer)
            taken.inner.append(inner)
            taken.weights.append(weight)

    def close(self, number: int, model: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Further changes at the end of round `number`, given the model with the round's means; None for an
        array that is removed."""
        return {}

    def narrowed(self, client: str, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters for a client of a smaller rank; empty for all others."""
        if (rank := self.ranks.get(client)) is None:
            return {}
        names = filter(lora.is_adapter, model)
        return {name: lora.narrowed(name, model[name], rank) for name in names if not is_merged_delta(name)}

    def widened(
        self, client: str, arrays: Mapping[str, Tensor], model: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The arrays that such a client sent, padded with zeros."""
        if client not in self.ranks:
            return dict(arrays)
        return {
            name: value if value.shape == model[name].shape else lora.widened(name, value, model[name].shape)
            for name, value in arrays.items()
        }


def make_rule(config: Config) -> AdapterRule:
    """The rule that the configuration names."""
    adapter = config.adapter
    if adapter.name == "none":
        return AdapterRule()
    ranks = {str(client): rank for client, rank in adapter.ranks.items()}
    for client, rank in ranks.items():
        if type(rank) is not int or not 1 <= rank <= adapter.rank:
            raise UserError(
                f"adapter.ranks.{client}={rank} is out of range: it must be a whole number from 1 to "
                f"adapter.rank={adapter.rank}."
            )
    found: AdapterRule = registry.find("adapter_rules", adapter.rule)(
        adapter.alpha / adapter.rank, config.seed, ranks
    )
    return found


def as_merged_delta(
    number: int, path: str, outer: Tensor, inner: Tensor, model: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """outer · inner, added to one projection's weight after round `number`; None for arrays that it replaces.

    When the factors of its merged deltas become larger than the weight, one array of its size replaces them,
    so that a client that joins late never gets more than that.
    """
    new = lora.merged_delta_of(number, path, outer, inner)
    merged_deltas = lora.merged_deltas_by_path({**model, **new}).get(path, {})
    dense = [name for name in merged_deltas if name.endswith(f"/{path}.weight")]
    factors = sum(value.numel() for name, value in merged_deltas.items() if name not in dense)
    size = outer.shape[0] * inner.shape[1]
    if factors <= size and len(dense) <= 1:
        return dict(new)
    whole = lora.sum_of({name: value.to(outer.device) for name, value in merged_deltas.items()})
    return {
        **{name: None for name in merged_deltas if name not in new},
        merged_delta_name(number, f"{path}.weight"): whole.to(outer.dtype),
    }
