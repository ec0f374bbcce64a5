"""Private attention: what FedTP keeps personal (Li et al., Federated Learning by Transformer Personalization,
arXiv 2211.01572), without the hypernetwork that would generate it.

    Wᵢ_{Q,K,V}                 the query, key and value projections are trained and kept on client i
    ξ ← Σᵢ (nᵢ/n) ξᵢ           everything else is sent and averaged

The mirror of FedFrozen: there the kernel is shared and fixed, here it is personal and trained.
"""

from dataclasses import dataclass

from fedfrozen_app.config import setting
from strategies import fedper


@dataclass(frozen=True)
class Settings(fedper.Settings):
    private: list[str] = setting(["query", "key", "value"], fedper.HELP)


class PrivateAttention(fedper.FedPer):
    """Keep queries, keys and values on the client; average everything else."""

    paper = "after Li et al. 2022, arXiv 2211.01572"
    Settings = Settings
