"""FedNova's client: Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481.

K steps of SGD with momentum ρ move the model by −η Σ_k a_k g_k, where Σ_k a_k is

    a = (K − ρ(1 − ρᴷ)/(1 − ρ))/(1 − ρ)        K for ρ = 0; K(K + 1)/2 for ρ = 1

What is sent is w_t + Δᵢ/aᵢ, and aᵢ with it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, Finished, Start
from fedfrozen_app.models.task import Parameters

STEPS = "accumulated_steps"  # the metric in which aᵢ is sent


def accumulated(steps: Tensor, momentum: float) -> Tensor:
    """aᵢ: the accumulated weight of the gradients of `steps` steps with this momentum."""
    if momentum == 1:
        return steps * (steps + 1) / 2
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True)
class FedNova(Algorithm):
    momentum: float
    metric_names: ClassVar[tuple[str, ...]] = (STEPS,)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        a = accumulated(steps, self.momentum)
        sent = {name: start.model[name] + (value - start.model[name]) / a for name, value in trained.items()}
        return Finished(model=sent, metrics={STEPS: a})
