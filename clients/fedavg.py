"""FedAvg's client: the task's loss alone."""

from fedfrozen_app.local.algorithm import Algorithm


class FedAvg(Algorithm):
    """fᵢ(w)."""
