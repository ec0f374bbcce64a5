"""FFA-LoRA: Sun et al., Improving LoRA in Privacy-preserving Federated Learning, arXiv 2403.12313.

    A keeps its random initial value        B̄ = Σ pᵢBᵢ        s·B̄A = s·Σ pᵢBᵢA

The result is exactly the mean of the clients' models, with half of the bytes. Updates lie in A's row space.
"""

from collections.abc import Iterable

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.rule import AdapterRule


class FFA(AdapterRule):
    """Freeze A at its random initial value, average B."""

    paper = "Sun et al. 2024, arXiv 2403.12313"

    def frozen(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.endswith(f".{lora.A}")]
