"""Make a run's pacer."""

from fedfrozen_app.config import PacingConfig
from fedfrozen_app.server.cohort_pacer import CohortPacer
from fedfrozen_app.server.pacer import BufferedPacer, DeadlinePacer, Pacer


def make_pacer(
    config: PacingConfig, seed: int, participation: float, *, masked: bool = False
) -> Pacer | None:
    """The run's pacer; None for synchronous rounds, which wait for all clients. `masked`: with masks."""
    buffered = CohortPacer if masked else BufferedPacer
    kinds: dict[str, type[Pacer]] = {"deadline": DeadlinePacer, "buffered": buffered}
    kind = kinds.get(config.name)
    return None if kind is None else kind(config, seed, participation)
