"""q-FedAvg: Li et al., Fair Resource Allocation in Federated Learning, arXiv 1905.10497.

    w ← w − Σᵢ pᵢ Fᵢ^q Δᵢ / Σᵢ pᵢ hᵢ        Δᵢ and hᵢ as in clients/qfedavg.py

over the clients that replied, with their shares of examples pᵢ. Clients with a high loss get more weight, the
more so the larger q is; q = 0 is FedAvg. The server needs two means and no individual reply, so it works with
secure aggregation.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clients.qfedavg import H
from fedfrozen_app.config import ClientConfig, Config, setting
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.server import base
from fedfrozen_app.server.aggregate import Update


@dataclass(frozen=True)
class Settings(base.Settings):
    q: float = setting(1.0, "How much more clients with a high loss count; 0 is FedAvg", least=0)
    lipschitz: float | None = setting(None, "L, the inverse of a step size; null is 1/client.lr", above=0)


class QFedAvg(base.PlannedFedAvg):
    """Give clients with a high loss more weight, so that the model serves all clients equally well."""

    paper = "Li et al. 2020, arXiv 1905.10497"
    Settings = Settings
    algorithm = "qfedavg"
    codecs = "complete"

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        if config.aggregation.name != "mean":
            raise UserError(
                "strategy=qfedavg divides the mean update by a number that its clients report, which one "
                f"client could make up unnoticed by aggregation={config.aggregation.name}: choose "
                "aggregation=mean."
            )

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"q": settings.q, "lipschitz": settings.lipschitz or 1 / client.lr}

    def step(self, update: Update) -> dict[str, Tensor]:
        if H not in update.metrics:
            raise RunFailed(f"No client sent {H}: the sites need this version.")
        update.model = {name: mean / update.metrics[H] for name, mean in update.model.items()}
        return super().step(update)
