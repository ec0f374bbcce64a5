"""A run whose rounds do not wait for all clients: who is at work, and the replies that are on their way."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server.late_replies import WEIGHTS, LateReplies
from fedfrozen_app.server.pacer import Pacer

# How long a client takes for a request: its name, its plan, bytes down and up, and when it is asked.
TimeOf = Callable[[str, Plan, int, int, float], ClientTime]


@dataclass
class Pacing:
    pacer: Pacer
    time_of: TimeOf
    late: LateReplies = field(default_factory=LateReplies)

    def weight(self, staleness: int) -> float:
        return WEIGHTS[self.pacer.config.staleness_weight](staleness)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside `arrays`."""
        return {"pacer": self.pacer.state_dict(), "late": self.late.state_dict()}

    def arrays(self) -> dict[str, Tensor]:
        return self.late.arrays()

    def load(
        self, state: Mapping[str, Any], arrays: Mapping[str, Tensor], excluded: Collection[str] = ()
    ) -> None:
        """Restore them, without clients that take no part any more. A run with another pacing starts with
        everybody free."""
        if state.get("pacer", {}).get("name") != self.pacer.config.name:
            return
        self.pacer.load_state_dict(state["pacer"])
        self.late.load(state["late"], arrays)
        for client in set(self.pacer.at_work) & set(excluded):
            del self.pacer.at_work[client]
            self.late.pop(client)
