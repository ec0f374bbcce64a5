"""The unit of accounting. Separate from the accountant, so that reading a record loads nothing heavy."""

from typing import NamedTuple

NOISE, SENSITIVITY = "noise_multiplier", "sensitivity"  # metrics of a client with noise in the sum
COUNT_NOISE = "count_noise"  # and of the count of clients within its bound
SLACK = 1e-6  # of ε, for rounding between what was solved and what is counted


class Steps(NamedTuple):
    """`times` releases of a sum over a Poisson sample, each example's part clipped to norm C."""

    noise: float  # noise multiplier σ: the Gaussian noise on the sum has standard deviation σ·C
    rate: float  # q, the probability that an example is in the sample
    times: int
