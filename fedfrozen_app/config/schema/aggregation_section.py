"""`aggregation.*`: how clients' updates become one."""

from dataclasses import dataclass

from fedfrozen_app.config.needs import only_with
from fedfrozen_app.config.settings import setting


@dataclass
class AggregationConfig:
    name: str = setting("mean", "Set by the file", choices=("mean", "trimmed_mean", "median", "krum"))
    trim: float = setting(
        0.2,
        "`trimmed_mean`: share cut off at either end of each value",
        least=0,
        most=0.49,
        needs=only_with("aggregation", "trimmed_mean"),
    )
    malicious: int = setting(
        0,
        "`krum`: so many of a round's clients may send poison; with fewer than `malicious` + 3 replies the "
        "model stays as it was",
        least=0,
        needs=only_with("aggregation", "krum"),
    )
    far_out: float | None = setting(
        None,
        "Set aside an update whose norm is over so many times the median of the last round's. `null`: none; "
        "never in the first round",
        least=1,
    )
    cohorts: str = setting(
        "auto",
        "`batches`: a round draws whole batches of `secure_aggregation.min_cohort` clients, always the same "
        "ones, each with a sum of its own if it is complete; `free`: any clients; `auto`: batches where real "
        "sites send masked sums without noise; see "
        "[Secure aggregation](secure-aggregation.md#sums-over-almost-the-same-sites)",
        choices=("auto", "free", "batches"),
    )
    quorum: float = setting(
        0.0,
        "Share of a round's clients whose replies must be sound, or the model stays as it was",
        least=0,
        most=1,
    )
