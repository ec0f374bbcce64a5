"""pFedMoAP: Luo et al., Mixture of Experts Made Personalized: Federated Prompt Learning, arXiv 2410.10114.

    p        a text context: every client starts a round from the mean of the last round's, p ← Σᵢ (nᵢ/n) pᵢ
    pool     the server keeps the context that each client sent last, pⱼ
    Eᵢ       the K contexts of other clients in the pool nearest to its own, ‖pⱼ − pᵢ‖: client i is
             sent these with its request, and holds them fixed
    Aᵢ       its gate, an attention module that never leaves it

    logits   λ · exp(s) ⟨x, t(p)⟩ + exp(s) ⟨x', Aᵢ(x'; t'(p), t'(e) for e in Eᵢ)⟩

with x a picture's features, t a class's, and x', t' every n-th of their numbers (clients/pfedmoap.py). A
client that takes part for the first time is not in the pool, has no experts, and trains its context alone:
exp(s) ⟨x, t⟩. Clients learn no names: experts are numbered by rank. But they do see other clients' individual
contexts, not averaged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from fedfrozen_app.adapters.design import TextDesign
from fedfrozen_app.config import setting
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server import base
from fedfrozen_app.server.prompt_learning import PromptLearning

if TYPE_CHECKING:
    from fedfrozen_app.adapters.prompts import PromptedDual

CONTEXT = "prompts.text.global"


@dataclass(frozen=True)
class Settings(base.Settings, TextDesign):
    prompts: ClassVar[str] = "global"  # the client's own part is a gate, not a prompt
    within: ClassVar[str] = "strategy."

    experts: int = setting(
        3, "K: contexts of other clients that a client is given, the nearest; the authors give 9", least=1
    )
    share: float = setting(0.5, "λ: weight of the scores by the client's own context alone", least=0)
    gate_heads: int = setting(8, "Heads of the gate's attention", least=1)
    gate_width: int = setting(
        128, "Numbers of a feature that the gate looks at, if there are as many", least=1
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        return self.checked_design()

    @property
    def expert_names(self) -> list[str]:
        return [f"prompts.text.expert{number}" for number in range(1, self.experts + 1)]


class PFedMoAP(PromptLearning):
    """One text context per client, mixed with the nearest ones of other clients by a private gate."""

    paper = "Luo et al. 2024, arXiv 2410.10114"
    Settings = Settings
    keeps_replies = True
    one_by_one = "passes on"
    undecided = "What is told of a client's experts is the most: those that it holds already are not sent."

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.pool: dict[str, Tensor] = {}  # by client: the context that it sent last

    @classmethod
    def reading(cls) -> "type[PromptedDual]":
        from clients.pfedmoap import GatedDual

        return GatedDual

    def plan(self, server_round: int) -> Plan:
        return super().plan(server_round).freeze(self.settings.expert_names)

    def per_client_names(self, client: str, seen: Collection[str]) -> Sequence[str]:
        others = len(seen) - 1 if client in seen else 0
        return self.settings.expert_names[:others]

    def per_client_arrays(self, client: str) -> dict[str, Tensor]:
        names = self.per_client_names(client, self.pool)
        if not names:
            return {}
        own = self.pool[client].double()
        far = {c: float(torch.dist(p.double(), own)) for c, p in self.pool.items() if c != client}
        nearest = sorted(far, key=lambda other: (far[other], other))  # ties by name, so that runs repeat
        return {name: self.pool[other] for name, other in zip(names, nearest, strict=False)}

    def keep_reply(self, client: str, sent: Mapping[str, Tensor]) -> None:
        self.pool[client] = sent[CONTEXT]

    def state(self) -> dict[str, Tensor]:
        return dict(self.pool)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.pool = dict(state)
