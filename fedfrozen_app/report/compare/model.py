"""The data model of a comparison: plain data for terminal, files and page."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.files.rows import metric_title

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished run, as read from its folder."""

    folder: Path
    seed: int
    summary: dict[str, Any]  # summary.json
    rows: list[Row]  # metrics.jsonl, round 0 first
    metrics: dict[str, float]  # by the keys of METRICS; absent if not reported
    reached: bool = True  # whether its test metric reached the target within the horizon
    baselines: dict[str, float] = field(default_factory=dict)  # results of `fedfrozen baselines`, by name


@dataclass(frozen=True)
class Spread:
    """One metric over the seeds of a group."""

    values: dict[int, float]  # by seed
    mean: float
    std: float | None  # n - 1 in the denominator; None with one seed
    low: float | None  # 95 % interval of the mean (Student); None with one seed
    high: float | None  # both within the metric's range


@dataclass(frozen=True)
class Test:
    """A group against its baseline, over the seeds that both have."""

    baseline: str  # label of the baseline's group
    seeds: list[int]
    difference: float  # mean of group - baseline
    effect: float | None = None  # that over the standard deviation of the differences (Cohen's d_z)
    t: float | None = None  # p of the paired t test; None: too few seeds
    wilcoxon: float | None = None  # p of the signed-rank test
    t_holm: float | None = None  # the same, corrected for the number of groups tested
    wilcoxon_holm: float | None = None
    beside: list[str] = field(default_factory=list)  # other differences, set by the method's file
    verdict: str = ""  # "better" | "worse" | "no difference shown" | "too few seeds"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str  # short and unique: "fedprox, partition.alpha=0.1"
    settings: dict[str, Any]  # dotted key -> value, for the keys in which groups differ
    named_by: list[str]  # those of the keys that are in the label
    words: dict[str, str] | None  # overrides of its first run's command; None: unknown
    runs: list[Run]  # by seed
    spreads: dict[str, Spread]  # by the keys of METRICS
    test: Test | None = None  # None for a baseline, or without one


@dataclass(frozen=True)
class Comparison:
    metric: str  # such as "accuracy": the metric of test_*, final_test_* ...
    tested: str  # the tested metric, a key of METRICS
    target: float | None  # of *_to_target
    horizon: int  # the last round that every run could have trained
    groups: list[Group]
    baseline: dict[str, Any] = field(default_factory=dict)  # the settings that define a baseline
    common: dict[str, Any] = field(default_factory=dict)  # dotted keys on which all runs agree
    left_out: list[tuple[Path, str]] = field(default_factory=list)  # folder, reason
    notes: list[str] = field(default_factory=list)  # sentences for the reader


# name -> the heading of its column. Accuracies are fractions, bytes are summed over all clients. "selected"
# is the round with the best validation accuracy; "best" is chosen on the test set itself and thus too good.
METRICS = {
    "final": "final test {metric}",
    "selected": "selected test {metric}",
    "best": "best test {metric}",
    "std_last_10": "std last 10",
    "best_minus_final": "best − final",
    "worst_client": "worst client",
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "rounds_to_target": "rounds to {target} (of {horizon})",
    "bytes_to_target": "bytes to {target}",
    "virtual_to_target": "virtual time to {target}",
    "virtual_seconds": "virtual time",
    "seconds": "seconds",
}
IN_SHARES = ("accuracy", "f1", "c_index")  # metrics of test_* that lie between 0 and 1
SHARES = ("final", "selected", "best", "std_last_10", "best_minus_final", "worst_client")


def bounds(name: str, metric: str = "accuracy") -> tuple[float, float]:
    """The least and the greatest value that a metric can have."""
    if metric not in IN_SHARES and name in SHARES:
        return (0.0 if name in ("std_last_10", "best_minus_final") else -math.inf, math.inf)
    return (0.0, 1.0 if name in SHARES else math.inf)


def heading(name: str, comparison: Comparison) -> str:
    """The column's title, with the metric and the target filled in."""
    target = "target" if comparison.target is None else f"{comparison.target:g}"
    return METRICS[name].format(
        metric=metric_title(comparison.metric), target=target, horizon=comparison.horizon
    )
