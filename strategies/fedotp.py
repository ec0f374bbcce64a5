"""FedOTP: Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, 2024.

    p_G      a global context: trained, sent, averaged
    pᵢ       the client's own, never sent

An image is its M patches, a class its two texts. The score of a class is exp(s) · Σ T ⊙ cos(patches, texts)
with T the cheapest plan, smoothed by ε, that brings mass γ in equal parts to the texts and takes at most 1/M
from each patch: patches that match neither text are left out (clients/fedotp.py). No gradient flows through
T. γ = 1 is balanced transport.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from fedfrozen_app.adapters.design import TextDesign
from fedfrozen_app.config import setting
from fedfrozen_app.server import base
from fedfrozen_app.server.prompt_learning import PromptLearning

if TYPE_CHECKING:
    from fedfrozen_app.adapters.prompts import PromptedDual


@dataclass(frozen=True)
class Settings(base.Settings, TextDesign):
    within: ClassVar[str] = "strategy."

    mass: float = setting(
        0.8, "γ: how much of a picture is matched; 1 matches all its patches", above=0, most=1
    )
    epsilon: float = setting(
        0.1, "ε: a smaller one makes the matching sharper, and harder to find", least=0.01
    )
    iterations: int = setting(20, "Steps towards the plan", least=1)

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        return self.checked_design()


class FedOTP(PromptLearning):
    """Match a global and a local text context with an image's patches by optimal transport."""

    paper = "Li et al. 2024, arXiv 2403.00041"
    Settings = Settings

    @classmethod
    def reading(cls) -> "type[PromptedDual]":
        from clients.fedotp import TransportDual

        return TransportDual
