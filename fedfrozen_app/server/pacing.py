"""A run whose rounds do not wait for all clients: which clients are busy, and which replies are in flight."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.server.late_replies import WEIGHTS, LateReplies
from fedfrozen_app.server.late_sums import LateSums
from fedfrozen_app.server.pacer import Pacer


class Times(Protocol):
    """How long clients take for a request."""

    def of(
        self, client: str, plan: Plan, down: int, up: int, asked_at: float, most: int | None = None
    ) -> ClientTime:
        """The times of a request with `down` and `up` bytes; `most`: the maximum number of local steps."""

    def steps(self, client: str, plan: Plan) -> int:
        """The number of local steps of a full request."""


@dataclass
class Pacing:
    pacer: Pacer
    times: Times
    late: LateReplies = field(default_factory=LateReplies)
    sums: LateSums = field(default_factory=LateSums)  # of masked cohorts, in place of replies

    @property
    def live(self) -> bool:
        """Whether nodes are real ones, whose times are not simulated."""
        return False

    def weight(self, staleness: int) -> float:
        return WEIGHTS[self.pacer.config.staleness_weight](staleness)

    def steps_within(
        self, client: str, plan: Plan, sizes: tuple[int, int], asked_at: float, limit: float
    ) -> int:
        """The number of local steps that leaves time to reply by `limit`; at least one."""
        least, most = 1, self.times.steps(client, plan)

        def ends(steps: int) -> float:
            return asked_at + self.times.of(client, plan, *sizes, asked_at, steps).total

        while least < most:  # bisection: time grows with steps
            middle = (least + most + 1) // 2
            if ends(middle) <= limit:
                least = middle
            else:
                most = middle - 1
        return least

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in addition to `arrays`."""
        late, sums = self.late.state_dict(), self.sums.state_dict()
        return {"pacer": self.pacer.state_dict(), "late": late} | ({"sums": sums} if sums else {})

    def arrays(self, held: Collection[str] = ()) -> dict[str, Tensor]:
        """The arrays for a checkpoint. `held`: digests of those that it has anyway."""
        return self.late.arrays() | self.sums.arrays()

    def load(
        self, state: Mapping[str, Any], arrays: Mapping[str, Tensor], excluded: Collection[str] = ()
    ) -> None:
        """Restore the state, without excluded clients. With another pacing all clients start idle."""
        if state.get("pacer", {}).get("name") != self.pacer.kind:
            return
        self.pacer.load_state_dict(state["pacer"])
        self.late.load(state["late"], arrays)
        self.sums.load(state.get("sums", {}), arrays)
        for client in sorted(set(self.pacer.at_work) & set(excluded)):
            if client in self.pacer.at_work:  # it may have been removed with its cohort
                freed = [one.client for one in self.pacer.remove(client)]
                self.late.discard(freed)
                self.sums.discard(freed)
