"""FedAdagrad: Reddi et al., arXiv 2003.00295.    v ← v + Δ̄²"""

from dataclasses import dataclass

from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.server.optimizers import adaptive


@dataclass(frozen=True)
class Settings(adaptive.Settings):
    beta1: float = setting(0.0, "Share of the mean movement that stays; below 1", least=0, most=1)


class Adagrad(adaptive.Adaptive):
    Settings = Settings

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
