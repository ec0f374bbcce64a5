"""The tables of benchmarks/flamby.py, from its rows."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import table
from scipy.stats import t as student

from fedfrozen_app.core.formatting import counted

# FLamby's own figures on its pooled test, of its seeds 42 to 46 (its repository's flamby/results).
BY_SEED: dict[str, dict[str, tuple[float, ...]]] = {
    "heart": {
        "fedavg": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "fedprox": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "scaffold": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "fedadam": (0.7756, 0.7677, 0.7795, 0.8031, 0.7677),
        "fedyogi": (0.7835, 0.7677, 0.7835, 0.7992, 0.7598),
        "fedadagrad": (0.7835, 0.7677, 0.7835, 0.7992, 0.7598),
        "pooled": (0.7913, 0.7953, 0.7953, 0.7992, 0.7953),
        "local_0": (0.7795, 0.7756, 0.7913, 0.7835, 0.7913),
        "local_1": (0.7165, 0.7283, 0.7480, 0.7165, 0.7244),
        "local_2": (0.5236, 0.5118, 0.4488, 0.4213, 0.5079),
        "local_3": (0.5827, 0.5866, 0.6614, 0.5787, 0.6457),
    },
    "tcga_brca": {
        "fedavg": (0.8026, 0.4227, 0.8081, 0.8289, 0.8143),
        "fedprox": (0.7758, 0.4278, 0.7963, 0.8084, 0.7751),
        "scaffold": (0.6971, 0.6579, 0.7513, 0.7092, 0.6821),
        "fedadam": (0.8381, 0.8209, 0.8560, 0.8619, 0.8337),
        "fedyogi": (0.8385, 0.8209, 0.8560, 0.8615, 0.8337),
        "fedadagrad": (0.8311, 0.8370, 0.8242, 0.8322, 0.8443),
        "pooled": (0.7963, 0.7799, 0.6095, 0.7824, 0.5524),
        "local_0": (0.7502, 0.6495, 0.6824, 0.6645, 0.7275),
        "local_1": (0.7560, 0.6447, 0.7495, 0.7256, 0.7619),
        "local_2": (0.6571, 0.5872, 0.5795, 0.5890, 0.6088),
        "local_3": (0.5396, 0.5645, 0.6821, 0.5447, 0.4941),
        "local_4": (0.7656, 0.7487, 0.7161, 0.7194, 0.6755),
        "local_5": (0.7084, 0.7066, 0.7136, 0.7165, 0.7062),
    },
}
VARIANTS = {"scaffold_rows": "scaffold", "fedadagrad_no_momentum": "fedadagrad"}  # whose figures stand beside
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
FIRST_SEED, LAST_SEED = 42, 46  # of FLamby; ours go on from there
HEAD = ["method", "seeds", "ours", "FLamby", "within one sd", "same seeds, ours less FLamby's", "less FedAvg"]


def published(dataset: str, method: str) -> tuple[float, ...] | None:
    """By seed, from `FIRST_SEED` on."""
    return BY_SEED[dataset].get(VARIANTS.get(method, method))


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
        self.same: list[dict[str, Any]] = []
        self.before: dict[tuple[str, str], list[float]] = {}  # of seeds below: other first weights
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            row = json.loads(line)
            kind = row["method"].partition("_")[0]
            if kind == "same":
                self.same.append(row)
            elif row["value"] is not None and (row["seed"] >= FIRST_SEED or kind == "loop"):
                self.by.setdefault((row["dataset"], row["method"]), {})[row["seed"]] = row["value"]
            elif row["value"] is not None:
                self.before.setdefault((row["dataset"], row["method"]), []).append(row["value"])

    def score(self, dataset: str, method: str) -> str:
        values = list(self.by[dataset, method].values())
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}"

    def published(self, dataset: str, method: str) -> str:
        known = published(dataset, method)
        return "" if known is None else f"{statistics.fmean(known):.3f} ± {statistics.stdev(known):.3f}"

    def inside(self, dataset: str, method: str) -> bool | None:
        """Whether our mean lies within the published mean ± one standard deviation; None without one."""
        known = published(dataset, method)
        if known is None:
            return None
        # FLamby prints three digits, and so has ours beside them.
        mean = round(statistics.fmean(self.by[dataset, method].values()), 3)
        theirs, spread = round(statistics.fmean(known), 3), round(statistics.stdev(known), 3)
        return abs(mean - theirs) <= spread + 1e-9

    def paired(self, dataset: str, method: str) -> str:
        """Our figures less FLamby's, at FLamby's seeds: the same first weights, other batches."""
        known, own = published(dataset, method), self.by[dataset, method]
        if known is None:
            return ""
        pairs = enumerate(known, FIRST_SEED)
        return interval([own[seed] - theirs for seed, theirs in pairs if seed in own])

    def less(self, dataset: str, method: str, other: str = "fedavg") -> str:
        """The difference to another method, paired by seed."""
        own, base = self.by[dataset, method], self.by[dataset, other]
        return interval([value - base[seed] for seed, value in own.items() if seed in base])

    def loop(self, method: str, *, theirs: bool) -> str:
        """Of the plain loop: with FLamby's seeds, or with ours."""
        own = self.by.get(("tcga_brca", f"loop_{method}"), {})
        values = [value for seed, value in own.items() if (FIRST_SEED <= seed <= LAST_SEED) == theirs]
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
            rows.append([TITLES[method], seeds, *own, inside, self.paired(dataset, method), less])
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
            known = published(dataset, method) or ()
            errors = [statistics.stdev(some) / len(some) ** 0.5 for some in (values, known)]
            away = (statistics.fmean(values) - statistics.fmean(known)) / math.hypot(*errors)
            found.append(
                f"**{TITLES[method]}, {NAMES[dataset]}**: {self.score(dataset, method)}, published "
                f"{self.published(dataset, method)}: {away:+.1f} standard errors of the "
                f"difference, {len(values)} seeds."
            )
        return found

    def same_draws(self) -> str:
        """How far our C-index is from the loop's, with the same first weights and batches."""
        if not self.same:
            return "not run yet"
        worst = max(abs(row["ours"] - row["value"]) for row in self.same)
        return f"{worst:.4f} at most in {counted(len(self.same), 'run')}"

    def same_pairs(self) -> str:
        """Each of these runs: our C-index, and the loop's."""
        return "; ".join(
            f"{TITLES[row['method'].removeprefix('same_')]}, seed {row['seed']}: "
            f"{row['ours']:.3f} and {row['value']:.3f}"
            for row in self.same
        )

    def below_zero(self) -> str:
        """Those of these runs whose weight of age ends below 0, with their C-index."""
        found = [row for row in self.same if row["age"] < 0]
        titled = ((TITLES[row["method"].removeprefix("same_")], row["seed"], row["ours"]) for row in found)
        return ", ".join(f"{title} at seed {seed} ({value:.3f})" for title, seed, value in titled) or "none"

    def earlier(self, dataset: str) -> str:
        """The means of the seeds that began at other first weights."""
        found = []
        for (name, method), values in self.before.items():
            if name == dataset and method in TITLES and len(values) > 1:
                spread = f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
                found.append(f"{TITLES[method]} {spread} ({len(values)})")
        return "; ".join(found)

    def tables(self) -> str:
        return "\n\n".join(f"{dataset}\n{self.table(dataset)}" for dataset in BY_SEED)
