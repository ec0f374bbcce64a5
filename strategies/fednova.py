"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481.

A client that takes more steps pulls FedAvg's mean towards its own optimum. Here each update is a mean step:

    w ← w + (Σᵢ pᵢ aᵢ) Σᵢ pᵢ Δᵢ/aᵢ

over the clients that replied; pᵢ are their shares of examples, aᵢ is defined in clients/fednova.py. With
equal aᵢ it is FedAvg, up to rounding. The metric `drift` refers to mean steps.
"""

from typing import Any

from torch import Tensor

from clients.fednova import STEPS
from fedfrozen_app.config import ClientConfig, Config, require_client
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.base import PlannedFedAvg


class FedNova(PlannedFedAvg):
    """Divide updates by the number of local steps before averaging them."""

    paper = "Wang et al. 2020, arXiv 2007.07481"
    algorithm = "fednova"
    codecs = "complete"
    pacings = ("deadline", "buffered")
    divides_by_steps = True

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        require_client(config, "counts the steps of SGD", optimizer="sgd")
        if config.aggregation.name != "mean":
            raise UserError(
                "strategy=fednova scales all updates by the mean number of steps, which one client could "
                f"make up unnoticed by aggregation={config.aggregation.name}: choose aggregation=mean."
            )
        if config.model.dtype == "bfloat16":
            raise UserError(
                "strategy=fednova sends mean steps, which model.dtype=bfloat16 would round away: use "
                "model.dtype=float32."
            )

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"momentum": client.momentum}

    def step(self, update: Update) -> dict[str, Tensor]:
        if STEPS not in update.metrics:  # every client of this version sends it
            raise RunFailed("No client said how many steps it took: the sites need this version.")
        steps = update.metrics[STEPS]
        update.model = {name: steps * mean for name, mean in update.model.items()}
        return super().step(update)
