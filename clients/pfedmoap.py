"""How pFedMoAP's client scores: Luo et al., Mixture of Experts Made Personalized, arXiv 2410.10114.

For an image x and a class with the texts t₀ (by the client's own context) and t₁ … t_K (by its experts'):

    a_k   = softmax over k of (W_Q x')·(W_K t'_k)/√d, head by head, over the experts that the client has
    mixed = W_O Σ_k a_k W_V t'_k

    score = exp(s) (λ ⟨x, t₀⟩ + ⟨x', mixed⟩), and exp(s) ⟨x, t₀⟩ for a client without experts

x' and t' are every n-th number of a feature. The experts' texts have no gradient. A missing expert is all
zeros, which no learned context is. So no branch is needed, and clients with different numbers of experts
train in one stacked step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.adapters.prompts import PromptedDual, PromptSet, full_precision
from fedfrozen_app.core.errors import UserError


class ExpertPrompts(PromptSet):
    """The client's own context and those of others, (1, tokens, width) each; the latter start as absent."""

    def __init__(self, design: Any, depth: int, tokens: int, width: int) -> None:
        super().__init__(design, depth, tokens, width)
        for name in design.expert_names:
            self.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.zeros(depth, tokens, width)))

    def experts(self, design: Any) -> Tensor:
        """(K, tokens, width), without a gradient."""
        names = [name.rpartition(".")[2] for name in design.expert_names]
        return torch.cat([getattr(self, name) for name in names]).detach()


class Gate(nn.Module):
    """Multi-head attention of an image over the texts of each class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, pictures: Tensor, texts: Tensor, there: Tensor) -> Tensor:
        """(batch, width), (experts, classes, width), (experts,) -> (batch, classes, width)."""
        query, key, value = (
            project(source).unflatten(-1, (self.heads, -1))
            for project, source in ((self.query, pictures), (self.key, texts), (self.value, texts))
        )
        scores = torch.einsum("bhd,echd->bche", query, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~there, -torch.inf).softmax(dim=-1)
        return self.output(torch.einsum("bche,echd->bchd", weights, value).flatten(-2))


class GatedDual(PromptedDual):
    Prompts = ExpertPrompts
    prompts: Any  # ModuleDicts of these, and of a gate
    fusion: Any

    def __init__(self, backbone: Any, design: Any, classes: tuple[str, ...]) -> None:
        super().__init__(backbone, design, classes)
        width = backbone.model.text_projection.out_features
        self._every = max(1, width // design.gate_width)  # n
        looked_at = len(range(0, width, self._every))
        if looked_at % design.gate_heads:
            raise UserError(
                f"{design.within}gate_heads={design.gate_heads} does not divide the {looked_at} numbers that "
                "the gate looks at: choose one that does."
            )
        self.fusion["text"] = Gate(looked_at, design.gate_heads)

    def scores(self, pictures: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        alone = scale * pictures @ texts[0].T
        if self._only_global:
            return alone
        experts = self.prompts["text"].experts(self.design)
        given = experts.abs().amax(dim=(1, 2)) > 0  # (K,)
        there = torch.cat([torch.ones_like(given[:1]), given])  # one's own always is
        small = pictures[:, :: self._every]
        mixed = self.fusion["text"](small, texts[..., :: self._every], there)
        gated = self.design.share * alone + scale * torch.einsum("bd,bcd->bc", small, mixed)
        return torch.where(given.any(), gated, alone)

    def _encode_texts(self) -> Tensor:
        """(1 + K, classes, width): from the client's own context, then from those experts' that it has."""
        with full_precision(self.backbone.scale()):
            own = self.prompts["text"](self.design, None, self._only_global)  # (1, tokens, width)
            if not self._only_global:
                own = torch.cat([own, self.prompts["text"].experts(self.design)])
        words = self._words[self.design.text_tokens]
        return functional.normalize(torch.stack([self.backbone.text(words, p) for p in own.unbind()]), dim=-1)
