"""APFL's client: Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Finished, Start
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class APFL(Algorithm):
    """α is one number for the whole model; it is kept with each name, as every array is."""

    alpha: float
    learn_alpha: bool = True
    stays, trains, numbers = ("v", "alpha"), ("v",), ("alpha",)

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        """Who has no v of its own begins at the round's model, with the α that the server says."""
        return {
            "v": {name: own.get("v", {}).get(name, value) for name, value in model.items()},
            "alpha": {
                name: own.get("alpha", {}).get(name, value.new_full((), self.alpha))
                for name, value in model.items()
            },
        }

    def look(self, batch: Batch, task: Task, start: Start, rate: float) -> ByNamespace:
        """α ← clip(α − η ⟨v − w, ∇f(v̄)⟩), once a round; the product is ∂f(v̄)/∂α."""
        if not self.learn_alpha:
            return {}
        v, alpha = start.own["v"], start.own["alpha"]

        def at(shift: Tensor) -> Tensor:
            moved = {name: value + shift for name, value in alpha.items()}
            return task.loss(mixed(v, start.anchor, moved), batch)

        slope = torch.func.grad(at)(torch.zeros_like(next(iter(alpha.values()))))
        return {"alpha": {name: (value - rate * slope).clamp(0, 1) for name, value in alpha.items()}}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """fᵢ(w) + fᵢ(v̄), v̄ = αv + (1 − α)w with w held: the gradient for v is α∇f(v̄), that for w ∇f(w)."""
        held = {name: parameters[name].detach() for name in start.own["v"]}
        own = mixed(start.own["v"], held, start.own["alpha"])
        return task.loss(parameters, batch) + task.loss(own, batch)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        alpha = start.own["alpha"]
        return Finished(own={"alpha": alpha}, figures={"alpha": next(iter(alpha.values()))})

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        return mixed(own["v"], model, own["alpha"])


def mixed(v: Parameters, w: Parameters, alpha: Parameters) -> dict[str, Tensor]:
    """v̄ = αv + (1 − α)w, for the names of v."""
    return {name: alpha[name] * v[name] + (1 - alpha[name]) * w[name] for name in v}
