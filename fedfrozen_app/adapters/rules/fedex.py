"""FedEx-LoRA: Singhal et al., Exact Aggregation for Federated and Efficient Fine-Tuning, arXiv 2410.09432.

    Ā = Σ pᵢAᵢ        B̄ = Σ pᵢBᵢ        W₀ ← W₀ + s·(Σ pᵢBᵢAᵢ − B̄Ā)

so that W₀ + s·B̄Ā is the mean of the clients' models. The residual is sent as its factors,
[s·p₁B₁ … s·pₙBₙ, −s·B̄] and [A₁; …; Aₙ; Ā], of rank (n + 1)·r.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.rule import AdapterRule, as_merged_delta


class FedEx(AdapterRule):
    """Average both factors, and add the residual to the frozen weights."""

    paper = "Singhal et al. 2024, arXiv 2410.09432"
    one_by_one = "multiplies"
    moves_base = True

    def close(self, number: int, model: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for path, taken in self._taken.items():
            outer, inner = taken.stacked(self.scale)
            mean_outer, mean_inner = model[f"{path}.{lora.B}"], model[f"{path}.{lora.A}"]
            residual = torch.cat([outer, -self.scale * mean_outer], dim=1), torch.cat([inner, mean_inner])
            found |= as_merged_delta(number, path, *residual, model)
        return found
