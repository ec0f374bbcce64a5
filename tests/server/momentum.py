"""A server optimiser as another package would write it: v ← βv + Δ̄, w ← w + v."""

from dataclasses import dataclass
from typing import Self

import pytest

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.server import optimizer
from fedfrozen_app.server.optimizer import ServerOptimizer


@dataclass(frozen=True)
class Settings(optimizer.Settings):
    beta: float = 0.5

    def checked(self, num_rounds: int) -> Self:
        if not 0 <= self.beta < 1:
            raise UserError(f"server_optimizer.beta={self.beta:g} must be at least 0 and below 1.")
        return self


class Momentum(ServerOptimizer):
    Settings = Settings

    def step(self, model, update):
        velocity = self.moments.setdefault("velocity", {})
        for name, mean in update.items():
            velocity[name] = self.settings.beta * velocity[name] + mean if name in velocity else mean
        return {name: model[name] + velocity[name] for name in update}


@pytest.fixture
def momentum(monkeypatch):
    """Known by name, as if it were built in."""
    monkeypatch.setitem(registry.BUILT_IN["server_optimizers"], "momentum", "tests.server.momentum:Momentum")
    registry.places.cache_clear()
    yield "server_optimizer.name=momentum"
    registry.places.cache_clear()
