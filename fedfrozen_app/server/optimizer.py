"""How a round's mean update becomes the next model: the configuration group `server_optimizer`.

An optimiser composes with every strategy. Its step depends on the names that the round's clients sent, not on
how they were planned, trained or averaged.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fedfrozen_app.config import Config, server_optimizer_settings
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.names import by_namespace, flattened


@dataclass(frozen=True)
class Settings:
    """The keys under `server_optimizer.`; only the name, unless an optimiser adds others."""

    def checked(self, num_rounds: int) -> Self:
        """These settings with defaults filled in, or a `UserError`."""
        return self


def below_one(**shares: float) -> None:
    """Raise a `UserError` for a decay of 1: moments would never fade."""
    for name, share in shares.items():
        if share >= 1:
            raise UserError(f"server_optimizer.{name}={share:g} must be at least 0 and below 1.")


class ServerOptimizer:
    """Base of server optimisers: defines `step`. Its state per parameter is in `moments`, which is saved and
    pruned automatically."""

    Settings = Settings
    adds_only = False  # whether the step is exactly w + Δ̄

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = settings if settings is not None else self.Settings()
        self.moments: dict[str, dict[str, Tensor]] = {}  # by kind ("velocity"), then by parameter

    def step(self, model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new values of the names in `update`, which is Δ̄.

        The arrays of `update` may be changed and returned. Those of `model` must not change: clients may hold
        the same arrays.
        """
        raise NotImplementedError

    def follow(self, names: Collection[str]) -> None:
        """Drop the moments of all names but these, which this round may change."""
        for kind, arrays in self.moments.items():
            self.moments[kind] = {name: value for name, value in arrays.items() if name in names}

    def state(self) -> dict[str, Tensor]:
        """The arrays that a checkpoint must keep."""
        return flattened(self.moments)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.moments = by_namespace(state)


class NoOptimizer(ServerOptimizer):
    """w + Δ̄, in the update's own memory: the mean of what the clients sent."""

    adds_only = True

    def step(self, model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if update:
            torch._foreach_add_(list(update.values()), [model[name] for name in update])
        return dict(update)


def make_optimizer(config: Config) -> ServerOptimizer:
    found = registry.find("server_optimizers", str(config.server_optimizer["name"]))
    return found(server_optimizer_settings(config))
