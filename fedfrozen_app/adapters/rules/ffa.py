"""FFA-LoRA: Sun et al., Improving LoRA in Privacy-preserving Federated Learning, arXiv 2403.12313.

    A stays as it was drawn        B̄ = Σ pᵢBᵢ        s·B̄A = s·Σ pᵢBᵢA

The mean is that of the clients' models, exactly, and half of it travels. What is learned lies in A's rows.
"""

from collections.abc import Iterable

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.rule import AdapterRule


class FFA(AdapterRule):
    """A frozen at its random start, B averaged."""

    paper = "Sun et al. 2024, arXiv 2403.12313"

    def frozen(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.endswith(f".{lora.A}")]
