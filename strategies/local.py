"""Local training only: the baseline that a federation must beat. Nothing is shared, nothing is averaged."""

from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server.base import PlannedFedAvg


class Local(PlannedFedAvg):
    """Every parameter is private: each client goes on from its own last round."""

    def plan(self, server_round: int) -> Plan:
        return super().plan(server_round).keep_private(self.model)
