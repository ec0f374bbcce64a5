"""A choice among several things by a sum that differential privacy covers.

What a client chooses shows everyone what its data score, so the choice is a release like any other:

    s = Σ_{i ∈ Poisson sample} clip(a_i − mean(a_i), 1) + N(0, σ²)        a_i: example i's score of each thing

The top K of s is post-processing. Subtracting an example's own mean changes no ranking and leaves its bounded
norm to the differences. The sum is never divided by the number of examples, which is private.
"""

import torch
from torch import Tensor

from fedfrozen_app.privacy.noise import Noise


def noisy_sum(scores: Tensor, noise: float, source: Noise) -> Tensor:
    """(examples, things) -> (things,): one example changes the sum by at most 1 before the noise.

    An example with scores that are not finite contributes nothing, or the sum would reveal it.
    """
    apart = scores - scores.mean(dim=1, keepdim=True)
    apart = torch.where(torch.isfinite(apart).all(dim=1, keepdim=True), apart, 0.0)
    length = torch.linalg.vector_norm(apart, dim=1, keepdim=True)
    total = (apart / length.clamp(min=1.0)).sum(dim=0)
    return source.added_to(total, noise)
