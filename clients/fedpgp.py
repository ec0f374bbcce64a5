"""FedPGP's client: Cui et al., Harmonizing Generalization and Personalization in Prompt Learning, 2024."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.adapters.prompts import STD, PromptedDual, PromptSet, Scores, full_precision
from fedfrozen_app.local.algorithm import Algorithm, Start
from fedfrozen_app.models.task import Batch, Parameters, Task


class LowRankPrompts(PromptSet):
    """The context p_G + UV: (1, tokens, width), (1, tokens, rank), (1, rank, width)."""

    def __init__(self, design: Any, depth: int, tokens: int, width: int) -> None:
        super().__init__(design, depth, tokens, width)
        self.u = nn.Parameter(STD * torch.randn(depth, tokens, design.rank))
        self.v = nn.Parameter(STD * torch.randn(depth, design.rank, width))

    def forward(self, design: Any, fusion: Any, only_global: bool) -> Tensor:
        shared = getattr(self, "global")
        return shared if only_global else shared + self.u @ self.v


class LowRankDual(PromptedDual):
    Prompts = LowRankPrompts

    def forward(
        self,
        pixel_values: Tensor | None = None,
        image_features: Tensor | None = None,
        pairs: bool = False,
    ) -> Scores:
        """With `pairs` no image is read: (classes, 2), cos(z_G, z_C) and cos(z_G, zᵢ)."""
        if not pairs:
            return super().forward(pixel_values, image_features)
        encode, words = self.backbone.text, self._words
        plain = functional.normalize(encode(words[0]), dim=-1)
        own = self._prompt("text")[0]
        shared = self.prompts["text"](self.design, None, only_global=True)[0]
        with_shared, with_own = (
            functional.normalize(encode(words[len(prompt)], prompt), dim=-1) for prompt in (shared, own)
        )
        with full_precision(plain):
            cosines = [(with_shared * other).sum(dim=-1) for other in (plain, with_own)]
            return Scores(torch.stack(cosines, dim=-1))


@dataclass(frozen=True)
class FedPGP(Algorithm):
    mu: float
    temperature: float

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """−log(e^a/(e^a + e^b)) = log(1 + e^(b − a)), a for the encoder's own text and b for the personal."""
        pairs = task.output_without_batch(parameters, pairs=True)
        contrast = functional.softplus((pairs[:, 1] - pairs[:, 0]) / self.temperature).mean()
        return task.loss(parameters, batch) + self.mu * contrast
