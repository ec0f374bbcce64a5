"""Base of the adaptive server optimisers: Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295.

The mean update Δ̄ stands for the negative gradient. In float arithmetic of the model's own type, name by name:

    m ← β₁ m + (1 − β₁) Δ̄        v ← the method's own        w ← w + ηₛ m / (√v + τ)

A name's moments start at zero when it is first sent, and again when it is unfrozen. docs/strategies.md
explains the defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.server import optimizer

CORRECTIONS = ("none", "adam", "flower")


@dataclass(frozen=True)
class Settings(optimizer.Settings):
    lr: float = setting(0.01, "The server's rate: about how far a weight moves in a round", above=0)
    beta1: float = setting(0.9, "Share of the mean movement that stays; below 1", least=0, most=1)
    tau: float = setting(1e-3, "Added to √v: a larger one adapts less", above=0)
    v_start: float = setting(0.0, "What v begins at. The paper's proofs ask for tau² or more", least=0)

    def checked(self, num_rounds: int) -> Self:
        optimizer.below_one(beta1=self.beta1)
        return self


@dataclass(frozen=True)
class CorrectedSettings(Settings):
    beta2: float = setting(0.99, "Share of the mean square that stays; below 1", least=0, most=1)
    correction: str = setting(
        "none",
        "Of the moments' start at zero. `none`: the paper. `adam`: m/(1 − β₁ᵗ) and v/(1 − β₂ᵗ) after t "
        "steps, as Kingma and Ba and torch. `flower`: ηₛ√(1 − β₂ᵗ⁺¹)/(1 − β₁ᵗ⁺¹), as Flower's FedAdam",
        choices=CORRECTIONS,
    )

    def checked(self, num_rounds: int) -> Self:
        optimizer.below_one(beta1=self.beta1, beta2=self.beta2)
        return self


class Adaptive(optimizer.ServerOptimizer):
    """Base class: subclasses define `second_moment`."""

    Settings = Settings

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round whose mean update has this square."""
        raise NotImplementedError

    def step(self, model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        m, v, steps = (self.moments.setdefault(kind, {}) for kind in ("m", "v", "steps"))
        beta1, merged = self.settings.beta1, {}
        for name, mean in update.items():
            if name not in m:
                m[name], v[name] = torch.zeros_like(mean), torch.full_like(mean, self.settings.v_start)
                steps[name] = torch.zeros((), dtype=torch.float64, device=mean.device)
            m[name] = beta1 * m[name] + (1 - beta1) * mean
            v[name] = self.second_moment(v[name], mean.square())
            steps[name] = steps[name] + 1
            merged[name] = model[name] + self.settings.lr * self.direction(m[name], v[name], steps[name])
        return merged

    def direction(self, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        return m / (v.sqrt() + self.settings.tau)


class Corrected(Adaptive):
    """An optimiser with optional bias correction of its moments."""

    Settings = CorrectedSettings

    def direction(self, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        own = self.settings
        if own.correction == "adam":
            return super().direction(m / (1 - own.beta1**steps), v / (1 - own.beta2**steps), steps)
        direction = super().direction(m, v, steps)
        if own.correction == "flower":
            later = steps + 1
            return direction * ((1 - own.beta2**later).sqrt() / (1 - own.beta1**later))
        return direction
