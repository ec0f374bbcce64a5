"""FedPGP: Cui et al., Harmonizing Generalization and Personalization in Federated Prompt Learning, 2024.

    pᵢ = p_G + UᵢVᵢ        the context before the class name: p_G is sent and averaged, the client's own
                           part has rank r and never leaves it

    fᵢ + μ · mean over classes of −log( exp(cos(z_G, z_C)/τ) / (exp(cos(z_G, z_C)/τ) + exp(cos(z_G, zᵢ)/τ)) )

with z the text features of p_G, of pᵢ, and (z_C) of the encoder's own template: the global context stays near
what the frozen encoder knows, and the personal one moves away from it. With μ = 0 the loss is fᵢ alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedfrozen_app.adapters.design import TextDesign
from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.server import base
from fedfrozen_app.server.prompt_learning import PromptLearning

if TYPE_CHECKING:
    from fedfrozen_app.adapters.prompts import PromptedDual


@dataclass(frozen=True)
class Settings(base.Settings, TextDesign):
    prompts: ClassVar[str] = "global"  # the client's own part is two factors, not a prompt
    within: ClassVar[str] = "strategy."

    rank: int = setting(8, "r: rank of the client's own part of the context", least=1)
    mu: float = setting(1.0, "μ: weight of the contrast", least=0)
    temperature: float = setting(0.5, "τ: a smaller one makes the contrast sharper", above=0)

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        return self.checked_design()


class FedPGP(PromptLearning):
    """A global text context that stays near zero-shot, plus one low-rank personal term per client."""

    paper = "Cui et al. 2024, arXiv 2405.09771"
    Settings = Settings
    algorithm = "fedpgp"

    @classmethod
    def reading(cls) -> "type[PromptedDual]":
        from clients.fedpgp import LowRankDual

        return LowRankDual

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        return cls.algorithm if settings.mu else "fedavg"

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"mu": settings.mu, "temperature": settings.temperature} if settings.mu else {}
