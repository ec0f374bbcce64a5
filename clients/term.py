"""TERM's client: Li et al., Tilted Empirical Risk Minimization, arXiv 2007.01162.

It trains as in FedAvg, and also sends Fᵢ, the loss of the round's model on its rows, which sets its weight.
"""

from typing import ClassVar

from torch import Tensor

from fedfrozen_app.local.algorithm import Algorithm, Finished, Start
from fedfrozen_app.models.task import Parameters

LOSS = "start_loss"  # the metric in which Fᵢ is sent


class TERM(Algorithm):
    start_loss: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = (LOSS,)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        assert start.loss is not None
        return Finished(metrics={LOSS: start.loss})
