"""A differentially private choice among several items, by a noisy sum of scores.

A client's choice reveals its data's scores, so the choice is a release like any other:

    s = Σ_{i ∈ Poisson sample} clip(a_i − mean(a_i), 1) + N(0, σ²)        a_i: example i's score of each item

The top K of s is post-processing. Subtracting an example's own mean changes no ranking and spends its bounded
norm on the differences. The sum is never divided by the number of examples, which is private.
"""

import torch
from torch import Tensor

from fedfrozen_app.privacy.noise import Noise


def noisy_sum(scores: Tensor, noise: float, source: Noise) -> Tensor:
    """(examples, items) -> (items,): one example changes the sum by at most 1 before the noise.

    An example with scores that are not finite contributes nothing, or the sum would reveal it.
    """
    apart = scores - scores.mean(dim=1, keepdim=True)
    apart = torch.where(torch.isfinite(apart).all(dim=1, keepdim=True), apart, 0.0)
    length = torch.linalg.vector_norm(apart, dim=1, keepdim=True)
    total = (apart / length.clamp(min=1.0)).sum(dim=0)
    return source.added_to(total, noise)
