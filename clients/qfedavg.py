"""q-FedAvg's client: Li et al., Fair Resource Allocation in Federated Learning, arXiv 1905.10497.

    Δ = L (w − wᵢ)        hᵢ = q F^(q − 1) ‖Δ‖² + L F^q

F is the loss of the round's model w on the client's rows. In place of wᵢ the client sends w − F^q Δ/L and
hᵢ/L: L cancels in the server's step, and updates keep their usual size.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, Finished, Start, squared_distance
from fedfrozen_app.models.task import Parameters

H = "qfedavg_h"  # the metric in which hᵢ/L is sent
LEAST = 1e-10  # lower bound of a loss: F^(q − 1) is undefined at zero


@dataclass(frozen=True)
class QFedAvg(Algorithm):
    q: float
    lipschitz: float
    start_loss: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = (H,)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        assert start.loss is not None
        loss, w, q = start.loss.clamp(min=LEAST), start.anchor, self.q
        h = q * loss ** (q - 1) * self.lipschitz * squared_distance(trained, w) + loss**q
        sent = {name: w[name] - loss**q * (w[name] - trained[name]) for name in w}
        return Finished(model=sent, metrics={H: h})
