"""FedIT: Zhang et al., Towards Building the Federated GPT, arXiv 2305.05644.

    Ā = Σ pᵢAᵢ        B̄ = Σ pᵢBᵢ

Each factor is averaged separately, like any parameter. The model is then W₀ + s·B̄Ā, which is not the mean
W₀ + s·Σ pᵢBᵢAᵢ of the clients' models: they differ by s·Σ pᵢ(Bᵢ − B̄)(Aᵢ − Ā).
"""

from fedfrozen_app.adapters.rule import AdapterRule


class Average(AdapterRule):
    """Average both factors separately."""

    paper = "Zhang et al. 2023, arXiv 2305.05644"
