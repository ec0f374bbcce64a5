"""What is known of a masked round when it is over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedfrozen_app.secure.layout import Sums


@dataclass
class MaskedResult:
    """Its sum, or why there is none."""

    sums: Sums | None
    problem: str | None  # why there is no sum of any cohort
    failures: Mapping[str, str]  # client: why it is not in the sum
    roster: int
    error: float  # how far rounding can have moved a mean of the clients
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # client: its epsilon and delta
    seconds: Mapping[str, float] = field(default_factory=dict)  # by step
    noise: Mapping[str, int] = field(default_factory=dict)
    groups: Sequence[Mapping[str, int]] = ()  # of each choice of layers, where they are summed apart
