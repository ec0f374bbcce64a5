"""APFL's client: Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Finished, Start
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class APFL(Algorithm):
    """FedAvg's loss plus that of the mixture. α is one number for the model, stored with every name."""

    alpha: float
    learn_alpha: bool = True
    client_state, trainable_state, scalar_state = ("v", "alpha"), ("v",), ("alpha",)
    metric_names = ("alpha",)

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        """A client without a stored v starts from the round's model, with the request's α."""
        return {
            "v": {name: own.get("v", {}).get(name, value) for name, value in model.items()},
            "alpha": {
                name: own.get("alpha", {}).get(name, value.new_full((), self.alpha))
                for name, value in model.items()
            },
        }

    def adapts(self) -> bool:
        return self.learn_alpha

    def first_batch_loss(self, shift: Tensor, batch: Batch, task: Task, start: Start) -> Tensor:
        """f(v̄) with α + shift: its gradient is ∂f(v̄)/∂α = ⟨v − w, ∇f(v̄)⟩."""
        return task.loss(
            mixed(start.client_state["v"], start.anchor, share(start.client_state) + shift), batch
        )

    def adapt(self, gradient: Tensor, start: Start, rate: float) -> ByNamespace:
        """α ← clip(α − η ⟨v − w, ∇f(v̄)⟩), once per round."""
        alpha = (share(start.client_state) - rate * gradient).clamp(0, 1)
        return {"alpha": dict.fromkeys(start.client_state["alpha"], alpha)}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """fᵢ(w) + fᵢ(v̄), v̄ = αv + (1 − α)w with w held: the gradient for v is α∇f(v̄), that for w ∇f(w)."""
        held = {name: parameters[name].detach() for name in start.client_state["v"]}
        own = mixed(start.client_state["v"], held, share(start.client_state))
        return task.loss(parameters, batch) + task.loss(own, batch)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        return Finished(
            client_state={"alpha": start.client_state["alpha"]}, metrics={"alpha": share(start.client_state)}
        )

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        return mixed(own["v"], model, share(own))


def share(own: ByNamespace) -> Tensor:
    """α: the same with every name."""
    return next(iter(own["alpha"].values()))


def mixed(v: Parameters, w: Parameters, alpha: Tensor) -> dict[str, Tensor]:
    """v̄ = αv + (1 − α)w, for the names of v."""
    return {name: torch.lerp(w[name], v[name], alpha) for name in v}
