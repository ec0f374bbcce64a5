"""Private attention: what FedTP keeps personal (Li et al., Federated Learning by Transformer Personalization,
arXiv 2211.01572), without the hypernetwork that would generate it.

    Wᵢ_{Q,K,V}                 the projections to queries, keys and values train and stay on client i
    ξ ← Σᵢ (nᵢ/n) ξᵢ           everything else travels and is averaged

The mirror of FedFrozen: there the kernel is everybody's and fixed, here it is everybody's own and moves.
"""

from dataclasses import dataclass

from fedfrozen_app.config import setting
from strategies import fedper


@dataclass(frozen=True)
class Settings(fedper.Settings):
    private: list[str] = setting(["query", "key", "value"], fedper.HELP)


class PrivateAttention(fedper.FedPer):
    """Queries, keys and values stay home; everything else is averaged."""

    paper = "after Li et al. 2022, arXiv 2211.01572"
    Settings = Settings
