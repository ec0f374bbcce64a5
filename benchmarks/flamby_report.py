"""The tables of benchmarks/flamby.py, from its rows."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from cells import table
from scipy.stats import t as student

# FLamby's own figures on its pooled test: mean and standard deviation over its seeds 42 to 46.
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "heart": {
        **dict.fromkeys(("fedavg", "fedprox", "scaffold", "scaffold_rows"), (0.748, 0.027)),
        **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad", "fedadagrad_no_momentum"), (0.779, 0.015)),
        "pooled": (0.795, 0.003),
        "local_0": (0.784, 0.007),
        "local_1": (0.727, 0.013),
        "local_2": (0.483, 0.045),
        "local_3": (0.611, 0.039),
    },
    "tcga_brca": {
        "fedavg": (0.735, 0.175),
        "fedprox": (0.717, 0.162),
        **dict.fromkeys(("scaffold", "scaffold_rows"), (0.699, 0.035)),
        **dict.fromkeys(("fedadam", "fedyogi"), (0.842, 0.017)),
        **dict.fromkeys(("fedadagrad", "fedadagrad_no_momentum"), (0.834, 0.007)),
        "pooled": (0.704, 0.114),
        "local_0": (0.695, 0.043),
        "local_1": (0.728, 0.048),
        "local_2": (0.604, 0.031),
        "local_3": (0.565, 0.070),
        "local_4": (0.725, 0.035),
        "local_5": (0.710, 0.004),
    },
}
TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD, the paper's rule",
    "scaffold_rows": "SCAFFOLD, FLamby's rule",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedadagrad": "FedAdagrad",
    "fedadagrad_no_momentum": "FedAdagrad, no momentum",
    "pooled": "pooled training",
    "pooled_slow": "pooled training, rate 0.001",
    **{f"local_{number}": f"site {number} alone" for number in range(6)},
}
NAMES = {"heart": "Heart", "tcga_brca": "TCGA-BRCA"}
PUBLISHED_SEEDS, FIRST_SEED = 5, 42
HEAD = ["method", "seeds", "ours", "FLamby", "within one sd", "less FedAvg, paired"]


def interval(pairs: Sequence[float]) -> str:
    """Mean and Student's 95 % interval."""
    if len(pairs) < 2:
        return ""
    mean = statistics.fmean(pairs)
    half = student.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


class Flamby:
    """Rows by data set and method: what the page of FLamby's tables says."""

    def __init__(self, folder: Path) -> None:
        file, self.by = folder / "flamby.jsonl", dict[tuple[str, str], dict[int, float]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            row = json.loads(line)
            if row["value"] is not None:
                self.by.setdefault((row["dataset"], row["method"]), {})[row["seed"]] = row["value"]

    def score(self, dataset: str, method: str) -> str:
        values = list(self.by[dataset, method].values())
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}"

    def published(self, dataset: str, method: str) -> str:
        known = PUBLISHED[dataset].get(method)
        return "" if known is None else f"{known[0]:.3f} ± {known[1]:.3f}"

    def inside(self, dataset: str, method: str) -> bool | None:
        """Whether our mean lies within the published mean ± one standard deviation; None without one."""
        known = PUBLISHED[dataset].get(method)
        if known is None:
            return None
        # The published figures have three digits, and so has ours beside them.
        mean = round(statistics.fmean(self.by[dataset, method].values()), 3)
        return abs(mean - known[0]) <= known[1] + 1e-9

    def less(self, dataset: str, method: str, other: str = "fedavg") -> str:
        """The difference to another method, paired by seed."""
        own, base = self.by[dataset, method], self.by[dataset, other]
        return interval([value - base[seed] for seed, value in own.items() if seed in base])

    def loop(self, method: str, *, theirs: bool) -> str:
        """Of the plain loop: with FLamby's seeds, or with ours."""
        own = self.by.get(("tcga_brca", f"loop_{method}"), {})
        values = [value for seed, value in own.items() if (seed >= FIRST_SEED) == theirs]
        if not values:
            return "not run yet"
        return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f} ({len(values)} seeds)"

    def methods(self, dataset: str) -> list[str]:
        return [method for method in TITLES if (dataset, method) in self.by]

    def table(self, dataset: str) -> str:
        rows = []
        for method in self.methods(dataset):
            inside = {None: "", True: "yes", False: "no"}[self.inside(dataset, method)]
            seeds = str(len(self.by[dataset, method]))
            less = "" if method == "fedavg" else self.less(dataset, method)
            own = [self.score(dataset, method), self.published(dataset, method)]
            rows.append([TITLES[method], seeds, *own, inside, less])
        return table(HEAD, rows)

    def left_over(self) -> list[str]:
        """Methods at FLamby's own settings whose mean lies beyond one deviation: how far, in deviations of
        the difference of two means."""
        found = []
        for dataset, method in self.by:
            apart = method in ("scaffold", "fedadagrad_no_momentum") or method not in TITLES
            if apart or self.inside(dataset, method) is not False:
                continue
            values = list(self.by[dataset, method].values())
            if len(values) < 2:
                continue
            mean, spread = PUBLISHED[dataset][method]
            error = math.hypot(statistics.stdev(values) / len(values) ** 0.5, spread / PUBLISHED_SEEDS**0.5)
            away = (statistics.fmean(values) - mean) / error
            found.append(
                f"**{TITLES[method]}, {NAMES[dataset]}**: {self.score(dataset, method)}, published "
                f"{self.published(dataset, method)}: {away:+.1f} standard errors of the "
                f"difference, {len(values)} seeds."
            )
        return found

    def tables(self) -> str:
        return "\n\n".join(f"{dataset}\n{self.table(dataset)}" for dataset in PUBLISHED)
