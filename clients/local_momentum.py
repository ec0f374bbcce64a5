"""SGD with a momentum that the client keeps: Yu, Jin and Yang, Momentum SGD, arXiv 1905.03817.

    m ← β m + ∇fᵢ(w)        w ← w − η m

m starts at zero and is kept by the client between rounds; `client.momentum` starts at zero in every round.
The paper also averages m over clients; here it never leaves the client.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Start
from fedfrozen_app.models.task import Parameters


@dataclass(frozen=True)
class LocalMomentum(Algorithm):
    beta: float
    client_state, step_state = ("m",), ("m",)
    private_step: ClassVar[bool] = True

    def step(
        self, parameters: Parameters, gradient: Parameters, state: ByNamespace, start: Start, lr: Tensor
    ) -> tuple[Parameters, ByNamespace]:
        m = {name: self.beta * state["m"][name] + g for name, g in gradient.items()}
        return {name: parameters[name] - lr * own for name, own in m.items()}, {"m": m}
