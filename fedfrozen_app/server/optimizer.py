"""How a round's mean update becomes the next model: the configuration group `server_optimizer`.

An optimiser composes with every strategy. Its step sees the names that the round's clients sent, and nothing
of how they were planned, trained or averaged.
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
    """The keys under `server_optimizer.`; none but the name, unless an optimiser adds some."""

    def checked(self, num_rounds: int) -> Self:
        """Themselves with defaults filled in, or a `UserError`."""
        return self


def below_one(**shares: float) -> None:
    """Refuse a share of 1: what is remembered would never fade."""
    for name, share in shares.items():
        if share >= 1:
            raise UserError(f"server_optimizer.{name}={share:g} must be at least 0 and below 1.")


class ServerOptimizer:
    """Defines `step`. What it remembers of each parameter is in `moments`: saved and pruned for it."""

    Settings = Settings
    adds_only = False  # whether the step is w + Δ̄ and nothing else

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = settings if settings is not None else self.Settings()
        self.moments: dict[str, dict[str, Tensor]] = {}  # by what it is ("velocity"), then by parameter

    def step(self, model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new values of the names in `update`, which is Δ̄.

        Its arrays may be changed and returned. Those of `model` must not change: clients may hold them too.
        """
        raise NotImplementedError

    def follow(self, names: Collection[str]) -> None:
        """Forget what is remembered of all but these names, the ones that this round may change."""
        for kind, arrays in self.moments.items():
            self.moments[kind] = {name: value for name, value in arrays.items() if name in names}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
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
