"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221.

    w   FedAvg's: trained, sent, averaged
    vᵢ  ← vᵢ − η (∇fᵢ(vᵢ) + λ (vᵢ − w_t))        the personal model, trained alongside w and never sent

λ = 0 is local training alongside FedAvg; a large λ keeps every vᵢ near the round's global model w_t. The
shared model is FedAvg's to the bit, whatever λ (with dropout, up to its random draws).
"""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    lam: float = setting(
        0.1, "λ: strength of the pull of a client's own model towards the round's global one", least=0
    )


class Ditto(base.PlannedFedAvg):
    """FedAvg plus one personal model per client, pulled towards the global one."""

    paper = "Li et al. 2021, arXiv 2012.04221"
    Settings = Settings
    algorithm = "ditto"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"lam": settings.lam}
