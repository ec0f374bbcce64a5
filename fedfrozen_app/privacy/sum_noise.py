"""The noise of a run with `secure_aggregation.noise=sum`: one σ, from settings shared by all clients.

A client's own participations, δ or budget do not affect it, because the others' shares protect it too: in a
sum of unequal shares, a client that asked for much noise would get the average. σ is solved for a client that
is in every round, and no message from a server can lower it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from fedfrozen_app.config import Config

DELTA = 1e-5  # where privacy.delta is null
ACCOUNTANT = "rdp"  # for integers, only the Rényi bound is known to equal that of the continuous Gaussian


@dataclass(frozen=True)
class SumNoise:
    """The noise with which a run's sums, one per round, cost ε at δ for a unit that is in all of them."""

    epsilon: float
    delta: float
    rounds: int
    share: float = 0.0  # of the loss, for the count of clients within the sum's bound

    @property
    def of_sum(self) -> float:
        """σ of the sum of updates: its noise has a standard deviation of σ · (what one unit can change)."""
        return self.multiplier / math.sqrt(1 - self.share)

    @property
    def of_count(self) -> float:
        """σ of the count, which one unit changes by one at most. As 1/σ² = 1/of_sum² + 1/of_count², both cost
        what σ alone does (Andrew et al. 2021, arXiv 1905.03871, for a count that changes by one)."""
        return self.multiplier / math.sqrt(self.share)

    @cached_property
    def multiplier(self) -> float:
        """The σ that is accounted for a round."""
        from fedfrozen_app.privacy.accountant import solve_noise  # imports Opacus, which is slow

        return solve_noise(1.0, self.rounds, epsilon=self.epsilon, delta=self.delta, kind=ACCOUNTANT)


def noise_of_run(config: Config) -> SumNoise:
    privacy, secure = config.privacy, config.secure_aggregation
    share = 0.0 if secure.quantile is None else secure.quantile_share
    return SumNoise(privacy.epsilon, privacy.delta or DELTA, max(config.num_rounds, 1), share)
