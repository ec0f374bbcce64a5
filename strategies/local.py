"""Local training only: the baseline that a federation must beat. Nothing is shared or averaged."""

from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server.base import PlannedFedAvg


class Local(PlannedFedAvg):
    """The baseline without a federation: every client trains alone and shares nothing."""

    def plan(self, server_round: int) -> Plan:
        return super().plan(server_round).keep_private(self.model)
