"""Server momentum, FedAvgM: Hsu et al., arXiv 1909.06335.

m ← β m + Δ̄        w ← w + ηₛ m        β = 0 and ηₛ = 1 is the plain mean, to the bit
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.server import optimizer


@dataclass(frozen=True)
class Settings(optimizer.Settings):
    lr: float = setting(1.0, "The server's rate", above=0)
    beta: float = setting(0.9, "Share of the last round's movement that stays; below 1", least=0, most=1)

    def checked(self, num_rounds: int) -> Self:
        optimizer.below_one(beta=self.beta)
        return self


class AvgM(optimizer.ServerOptimizer):
    Settings = Settings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.adds_only = self.settings.lr == 1 and self.settings.beta == 0

    def step(self, model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        m = self.moments.setdefault("m", {})
        for name, mean in update.items():
            m[name] = self.settings.beta * m[name] + mean if name in m else mean
        return {name: model[name] + self.settings.lr * m[name] for name in update}
