"""FLoRA: Wang et al., Federated Fine-Tuning with Heterogeneous Low-Rank Adaptations, arXiv 2409.05976.

    W₀ ← W₀ + s·[p₁B₁ … pₙBₙ][A₁; …; Aₙ]        then A is redrawn, and B = 0

The stack, of rank Σ rᵢ, is added to the frozen weights, and adapters are reinitialised in every round. The
model is exactly the mean of the clients' models, whatever their ranks.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.rule import AdapterRule, as_merged_delta


class Stack(AdapterRule):
    """Stack clients' adapters into the frozen weights; start with new ones in every round."""

    paper = "Wang et al. 2024, arXiv 2409.05976"
    one_by_one = "stacks"
    moves_base = True

    def constant(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.endswith(f".{lora.B}")]

    def close(self, number: int, model: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for path, taken in self._taken.items():
            found |= as_merged_delta(number, path, *taken.stacked(self.scale), model)
            inner, outer = f"{path}.{lora.A}", f"{path}.{lora.B}"
            shape = (model[inner].shape[0], model[inner].shape[1])
            found[inner] = lora.fresh(inner, shape, self.seed, number).to(model[inner])
            found[outer] = torch.zeros_like(model[outer])
        return found
