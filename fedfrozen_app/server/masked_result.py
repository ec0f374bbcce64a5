"""The result of a masked round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedfrozen_app.secure.layout import Sums


@dataclass
class MaskedResult:
    """The sum of a masked round, or why there is none."""

    sums: Sums | None
    problem: str | None  # why there is no sum of any cohort
    failures: Mapping[str, str]  # client: why it is not in the sum
    roster: int
    error: float  # largest rounding error of a mean over clients
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # client: its epsilon and delta
    seconds: Mapping[str, float] = field(default_factory=dict)  # by step
    noise: Mapping[str, int] = field(default_factory=dict)
    groups: Sequence[Mapping[str, int]] = ()  # per choice of layers, if these are summed separately
