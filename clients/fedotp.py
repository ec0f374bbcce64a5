"""How FedOTP's client reads an image: Li et al., Global and Local Prompts Cooperation via Optimal Transport.

    T = argmin ⟨T, 1 − S⟩ − ε H(T)        T ≥ 0,  T1 ≤ a,  Tᵀ1 = b

for each image and class, with S = cos(patches, texts), (M, n), a = 1/M each and b = γ/n each. Scaling finds
it (Benamou et al. 2015): with K = exp(−(1 − S)/ε), T = diag(u) K diag(v), repeat

    u = min(a / Kv, 1)        v = b / Kᵀu

It has no branch and a fixed number of iterations, so it runs under `vmap` and in CUDA graphs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.adapters.prompts import PromptedDual, full_precision


def partial_plan(similarity: Tensor, mass: float, epsilon: float, iterations: int) -> Tensor:
    """The transport plan, (..., patches, texts), of the similarity's shape; no gradient flows through it."""
    kernel = ((similarity.detach() - 1) / epsilon).exp()
    patches, texts = kernel.shape[-2:]
    from_each, to_each = 1 / patches, mass / texts
    v = torch.ones_like(kernel[..., 0, :])  # (..., texts)
    u = torch.ones_like(kernel[..., 0])  # (..., patches)
    for _ in range(iterations):
        u = (from_each / (kernel @ v.unsqueeze(-1)).squeeze(-1)).clamp(max=1.0)
        v = to_each / (u.unsqueeze(-2) @ kernel).squeeze(-2)
    return u.unsqueeze(-1) * kernel * v.unsqueeze(-2)


class TransportDual(PromptedDual):
    """Scores by transport between an image's patches and the texts of a class, one for each context."""

    def scores(self, pictures: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        # (batch, M, width), (n, classes, width) -> (batch, classes, M, n)
        similarity = torch.einsum("bmd,ncd->bcmn", pictures, texts)
        plan = partial_plan(similarity, self.design.mass, self.design.epsilon, self.design.iterations)
        return scale * (plan * similarity).sum(dim=(-2, -1))

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """(batch, patches, width), each of length 1."""
        return functional.normalize(self.backbone.patches(pixel_values), dim=-1)

    def _encode_texts(self) -> Tensor:
        """(contexts, classes, width): of the global context and, where there is one, of the local context."""
        with full_precision(self.backbone.scale()):
            known = ("global",) if self._only_global else self.design.levels
            prompts = [getattr(self.prompts["text"], level)[0] for level in known]
        words = self._words[self.design.text_tokens]
        return functional.normalize(torch.stack([self.backbone.text(words, p) for p in prompts]), dim=-1)
