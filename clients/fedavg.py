"""The plain client: its own task's loss, nothing else."""

from fedfrozen_app.local.algorithm import Algorithm


class FedAvg(Algorithm):
    """fᵢ(w)."""
