"""The noise of a run with `secure_aggregation.noise=sum`: one σ, from settings that all its clients share.

A client's own participations, δ or budget have no part in it, because the others' shares protect it too: in a
sum of unequal shares, a client that asked for much noise would get the average. Every client may be in every
round, so σ is solved for all of them; nothing that a server says can make it less.
"""

from dataclasses import dataclass

from fedfrozen_app.config import Config

DELTA = 1e-5  # where privacy.delta is null
ACCOUNTANT = "rdp"  # for whole numbers only Rényi's bound is known to equal that of the continuous Gaussian


@dataclass(frozen=True)
class SumNoise:
    """A run's sums, one per round, cost ε at δ for a unit that is in all of them."""

    epsilon: float
    delta: float
    rounds: int

    @property
    def multiplier(self) -> float:
        """σ: the noise in every sum has the standard deviation σ · (what one unit can change in it)."""
        from fedfrozen_app.privacy.accountant import solve_noise  # brings Opacus, which other runs do without

        return solve_noise(1.0, self.rounds, epsilon=self.epsilon, delta=self.delta, kind=ACCOUNTANT)


def noise_of_run(config: Config) -> SumNoise:
    privacy = config.privacy
    return SumNoise(privacy.epsilon, privacy.delta or DELTA, max(config.num_rounds, 1))
