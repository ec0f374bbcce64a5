"""SCAFFOLD's client: Karimireddy et al., Stochastic Controlled Averaging, arXiv 1910.06378, option II.

    w ← w − η (∇fᵢ(w) + c − cᵢ)        cᵢ⁺ = cᵢ − c + (w_t − wᵢ)/(a η)

The request contains c; the client keeps cᵢ, which starts at zero, and sends back cᵢ⁺ − cᵢ. The paper's steps
have no momentum, and a = K. With momentum ρ the model moves by the accumulated weight a of its gradients
(clients/fednova.py), so that cᵢ⁺ is still a mean of gradients, with larger weights for the early ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clients.fednova import accumulated
from fedfrozen_app.local.algorithm import Algorithm, Finished, Start
from fedfrozen_app.models.task import Batch, Parameters, Task


@dataclass(frozen=True)
class Scaffold(Algorithm):
    momentum: float

    from_server, client_state, to_server = ("c",), ("c",), ("dc",)

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """fᵢ(w) + ⟨c − cᵢ, w − w_t⟩, whose gradient is the corrected one."""
        c, own, model = start.from_server["c"], start.client_state["c"], start.model
        pulls = [((c[name] - own[name]) * (parameters[name] - model[name])).sum() for name in c]
        return task.loss(parameters, batch) + torch.stack(pulls).sum()

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        c, own, moved = (
            start.from_server["c"],
            start.client_state["c"],
            accumulated(steps, self.momentum) * rate,
        )
        new = {name: own[name] - c[name] + (start.model[name] - trained[name]) / moved for name in c}
        return Finished(
            client_state={"c": new}, to_server={"dc": {name: new[name] - own[name] for name in c}}
        )
