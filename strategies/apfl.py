"""APFL: Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461.

    w    FedAvg's: trained, sent, averaged
    vᵢ   ← vᵢ − η α ∇fᵢ(v̄ᵢ)          v̄ᵢ = α vᵢ + (1 − α) wᵢ is the client's personal model
    αᵢ   ← clip(αᵢ − η ⟨vᵢ − wᵢ, ∇fᵢ(v̄ᵢ)⟩, 0, 1)        once per round, on its first batch

vᵢ descends the mixture's loss, not its own. vᵢ and αᵢ never leave the client. The shared model is
FedAvg's to the bit; with α = 0, not learned, the personal model is the global one.
"""

from dataclasses import asdict, dataclass
from typing import Any

from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    alpha: float = setting(
        0.5, "α, or where it starts: the share of a client's own model in its mixture", least=0, most=1
    )
    learn_alpha: bool = setting(True, "Whether each client learns its own α, a step a round")


class APFL(base.PlannedFedAvg):
    """FedAvg plus one personal model per client, mixed with the global one by a learned weight."""

    paper = "Deng et al. 2020, arXiv 2003.13461"
    Settings = Settings
    algorithm = "apfl"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return asdict(settings)
