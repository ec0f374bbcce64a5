"""MimeLite's client: Karimireddy et al., Mime, arXiv 2008.03606.

    y ← y − η ((1 − β) ∇fᵢ(y) + β m)

The request contains m, which is fixed during the round. The client sends back ∇fᵢ(x), the full-batch gradient
at the round's model x.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Finished, Start
from fedfrozen_app.models.task import Parameters


@dataclass(frozen=True)
class MimeLite(Algorithm):
    beta: float
    from_server, to_server = ("m",), ("gradient",)
    start_gradient: ClassVar[bool] = True

    def step(
        self, parameters: Parameters, gradient: Parameters, state: ByNamespace, start: Start, lr: Tensor
    ) -> tuple[Parameters, ByNamespace]:
        m, beta = start.from_server["m"], self.beta
        return {n: w - lr * ((1 - beta) * gradient[n] + beta * m[n]) for n, w in parameters.items()}, {}

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        assert start.gradient is not None
        return Finished(to_server={"gradient": dict(start.gradient)})
