"""pFedDC: Zhang et al., Personalized Federated Learning via Dual-Prompt Optimization and Cross Fusion,
arXiv 2506.21144.

A frozen dual encoder is read through prompts. In each modality m client i has

    G_m      a global prompt:  trained, sent, averaged       G ← Σᵢ (nᵢ/n) Gᵢ over the round's clients
    Lᵢ_m     a local prompt:   trained, never sent
    Aᵢ_m     its cross-attention, private too                Pᵢ = G + W_O·MHA(Q = G, K = V = Lᵢ)

and the loss is the cross-entropy of exp(s)·cos(image(x; Pᵢ_vision), text(class; Pᵢ_text)).

W_O starts at 0. That, the residual, and which prompt is the query are our reading: the paper leaves them
open. The baselines are this strategy with fewer parts: PromptFL is prompts=global modalities=text; PromptFL +
FedProx adds mu > 0; prompts=local trains alone; prompts=none is zero-shot.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fedfrozen_app.adapters.design import PromptDesign
from fedfrozen_app.config import ClientConfig, setting
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.server import base
from fedfrozen_app.server.prompt_learning import PromptLearning


@dataclass(frozen=True)
class Settings(base.Settings, PromptDesign):
    mu: float = setting(
        0.0,
        "With `prompts=global`: FedProx's pull towards the round's global prompts",
        least=0,
        instead="is negative: it must be 0 or more.",
    )
    within: ClassVar[str] = "strategy."

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        self.checked_design()
        if self.mu and self.prompts != "global":
            raise UserError(
                "strategy.mu pulls towards the round's global prompts, so it needs strategy.prompts=global: "
                "local prompts have nothing to be pulled to."
            )
        if self.prompts == "none" and num_rounds:
            raise UserError("strategy.prompts=none has nothing to train: set num_rounds=0 (zero-shot).")
        return self


class PFedDC(PromptLearning):
    """Train prompts: global ones are averaged, local ones and their fusion are kept. Encoders are frozen."""

    paper = "Zhang et al. 2025, arXiv 2506.21144"
    Settings = Settings

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        return "fedprox" if settings.mu else super().algorithm_for(settings)

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {"mu": settings.mu} if settings.mu else {}
