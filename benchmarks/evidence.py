"""What the results pages state, computed from the rows in benchmarks/results.

`recompute.py` gives these objects to the pages' templates: a figure on a page is a call of a method here.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import freezing
import layer_choice_report
import methods as methods_study
import pfeddc_report
import public_numbers
import regimes
import safl
import safl_report
from alerts_results import TwelveAlerts
from cells import LAST, Difference, Row, mean_of_last, paired, read, table
from codecs_report import Codecs
from conformal_results import Conformal
from flamby_report import Flamby
from link_results import CodedLink
from mask_evidence import NoiseInSum
from measured import Adapters, Speed, Theory
from paced_results import PacedStudy
from text_results import TextBaselines
from vessels_report import Vessels

RESULTS = Path(__file__).parent / "results"
TIE = freezing.TIE


def verdict(difference: Difference) -> str:
    """Of one comparison, uncorrected. `tie` only where the whole interval lies within a point."""
    if abs(difference.mean) > difference.half:
        return "ahead" if difference.mean > 0 else "behind"
    return "tie" if abs(difference.mean) + difference.half <= TIE else "not distinguished"


def surviving(family: Sequence[Difference]) -> list[bool]:
    """Which members of a family differ from 0 after Holm's correction."""
    return [p < 0.05 for p in freezing.holm([difference.p for difference in family])]


def pooled(parts: Iterable[dict[int, float]]) -> Difference:
    """The differences of several sets of seeds as one."""
    values = [value for part in parts for value in part.values()]
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None
    return found


class MapStudy:
    """One study of the map (benchmarks/regimes.py)."""

    def __init__(self, name: str, folder: Path) -> None:
        self.study, self.folder = regimes.STUDIES[name], folder
        self.rows = regimes.scored(self.study, folder)

    @cached_property
    def names(self) -> list[str]:
        own = (setting.name for setting in self.study.settings)
        return [name for name in own if regimes.by_seed(self.rows, name, regimes.NEVER, "score")]

    def scores(self, setting: str, method: str, key: str = "score") -> dict[int, float]:
        return regimes.by_seed(self.rows, setting, method, key)

    def never(self, setting: str) -> str:
        return f"{statistics.fmean(self.scores(setting, regimes.NEVER).values()):.1f}"

    def gain(
        self,
        setting: str,
        method: str,
        other: str = regimes.NEVER,
        key: str = "score",
        seeds: Sequence[int] | None = None,
    ) -> Difference | None:
        key = "final" if (method, key) == (regimes.LAST_ROUND, "score") else key
        own = self.scores(setting, method, key)
        own = {seed: value for seed, value in own.items() if seeds is None or seed in seeds}
        return paired(own, self.scores(setting, other, key))

    def gains(self, method: str) -> dict[str, Difference]:
        found = {name: self.gain(name, method) for name in self.names}
        return {name: gain for name, gain in found.items() if gain is not None}

    def worst(self, method: str, without: str = "never a setting") -> Difference:
        own = [gain for name, gain in self.gains(method).items() if without not in name]
        return min(own, key=lambda gain: gain.mean)

    def best(self, method: str) -> Difference:
        return max(self.gains(method).values(), key=lambda gain: gain.mean)

    def mean(self, method: str) -> str:
        return f"{statistics.fmean(gain.mean for gain in self.gains(method).values()):+.1f}"

    def at_bytes(self, setting: str, method: str) -> Difference | None:
        """Against FedAvg stopped when it has sent as much."""
        never = {row["seed"]: row for row in self.rows.cells[(setting, regimes.NEVER)]}
        own = [row for row in self.rows.cells.get((setting, method), ()) if row["seed"] in never]
        cut = {row["seed"]: regimes.cut(never[row["seed"]], row["megabytes"]) for row in own}
        return paired(
            {row["seed"]: 100 * row["score"] for row in own},
            {seed: 100 * mean_of_last(values) for seed, values in cut.items()},
        )

    def all_at_bytes(self, method: str) -> list[Difference]:
        found = (self.at_bytes(name, method) for name in self.names)
        return [gain for gain in found if gain is not None]

    def share(self, setting: str, method: str) -> str:
        """Of FedAvg's bytes."""
        own, never = (
            statistics.fmean(row["megabytes"] for row in self.rows.cells[(setting, name)])
            for name in (method, regimes.NEVER)
        )
        return f"{own / never:.2f}"

    def warmup_tests(self, more: Sequence[str] = ()) -> list[tuple[str, str, Difference]]:
        """The family of Holm's correction: a run that two lengths share is one test."""
        return regimes.tests(self.rows, self.names, (*regimes.WARMUPS, *more))

    def tables(self) -> str:
        return regimes.report(self.study, self.folder)

    def spearman(self, method: str, predictor: str) -> str:
        place = 1 + list(regimes.PREDICTORS).index(predictor)
        lines = {line[0]: line for line in regimes.predictor_lines(self.rows, self.names)}
        return str(lines[method][place])


class Cpu:
    """benchmarks/cpu_repeat.py: the headline cell on a CPU."""

    def __init__(self, folder: Path) -> None:
        self.rows = read(folder / "regimes" / "cpu.jsonl")

    def scores(self, experiment: str, strategy: str) -> dict[int, float]:
        own = [row for row in self.rows if (row["experiment"], row["strategy"]) == (experiment, strategy)]
        return {row["seed"]: 100 * mean_of_last(row["curve"]) for row in own}

    def gain(self, experiment: str) -> Difference | None:
        return paired(self.scores(experiment, "fedfrozen"), self.scores(experiment, "fedavg"))

    def never(self, experiment: str) -> str:
        return f"{statistics.fmean(self.scores(experiment, 'fedavg').values()):.1f}"

    @property
    def minutes(self) -> str:
        return f"{sum(row['seconds'] for row in self.rows) / 60:.0f}"


class Tuning:
    """Studies A and B (benchmarks/freezing.py)."""

    def __init__(self, folder: Path) -> None:
        self.rows = freezing.Rows(read(folder / "regimes" / freezing.NAME))

    @staticmethod
    def arm(words: str) -> freezing.Arm:
        """`few constant 1 50%`, with `average` or the name of another frozen part behind."""
        experiment, schedule, rate, freeze, *more = words.split()
        scope = next((word for word in more if word in freezing.CONTROLS), "qk")
        freeze = freeze.replace("%", " %")
        return freezing.Arm(f"digits_{experiment}", schedule, rate, freeze, scope, average="average" in more)

    def gain(self, one: str, other: str) -> Difference | None:
        return self.rows.difference(self.arm(one), self.arm(other))

    def mean(self, words: str) -> str:
        return self.rows.mean(self.arm(words))

    def tuned(self, experiment: str, freeze: str) -> Difference | None:
        """Against never, both at the schedule and rate that validation rows choose."""
        name = f"digits_{experiment}"
        own, never = (self.rows.tuned(name, value)[0] for value in (freeze, freezing.NEVER))
        return self.rows.difference(own, never) if own and never else None

    def score(self, arm: freezing.Arm) -> dict[int, float]:
        return self.rows.scores(arm)

    def bytes_share(self, experiment: str, freeze: str) -> str:
        cells = [
            [
                row["megabytes"]
                for row in self.rows.rows
                if row["experiment"] == f"digits_{experiment}" and row["freeze"] == name
            ]
            for name in (freeze, freezing.NEVER)
        ]
        return f"{statistics.fmean(cells[0]) / statistics.fmean(cells[1]):.2f}"

    @cached_property
    def parts(self) -> dict[str, str]:
        """The generated parts of the page and of its appendix."""
        primary, controls, rule = (
            function(self.rows)[-1] for function in (freezing.primary, freezing.controls, freezing.rule)
        )
        return {
            "primary": primary,
            "controls": controls,
            "rule": rule,
            "account": freezing.account(self.rows),
            "appendix": freezing.appendix(self.rows),
        }


class Public:
    """benchmarks/public_numbers.py."""

    def __init__(self, folder: Path) -> None:
        self.all = read(folder / "public.jsonl")
        self.unfinished = read(folder / "public-unfinished.jsonl")
        self.rows = {(row["line"], row["seed"]): row for row in self.all if "failed" not in row}

    def percent(self, line: str, key: str, seed: int = 0) -> str:
        return f"{100 * self.rows[line, seed][key]:.1f}"

    def _mean(self, line: str, first: int, last: int) -> float:
        return 100 * statistics.fmean(self.rows[line, 0]["curve"][first - 1 : last])

    def rounds(self, line: str, first: int, last: int) -> str:
        """Mean test accuracy of these rounds, seed 0."""
        return f"{self._mean(line, first, last):.1f}"

    def rise(self, line: str) -> str:
        """Rounds 41 to 50 against 31 to 40."""
        return f"{self._mean(line, 41, 50) - self._mean(line, 31, 40):+.1f}"

    def apart(self, one: str, other: str, key: str = "score") -> str:
        return f"{100 * (self.rows[one, 0][key] - self.rows[other, 0][key]):+.1f}"

    def own(self, line: str, key: str) -> dict[int, float]:
        """By seed, in percent."""
        return {seed: 100 * row[key] for (name, seed), row in self.rows.items() if name == line}

    def mean(self, line: str, key: str) -> str:
        """Over the seeds that were run, with their standard deviation."""
        values = list(self.own(line, key).values())
        return f"{statistics.fmean(values):.1f}{public_numbers.spread_of(values)}"

    def seeds(self, line: str) -> int:
        return len(self.own(line, "score"))

    def off_in_the_last_round(self, line: str) -> str:
        """The mean last round minus NIID-Bench's figure."""
        return f"{statistics.fmean(self.own(line, 'final').values()) - self.published(line, 1):+.1f}"

    def reproduced(self, line: str) -> str:
        """The verdict on the best round by rule 1 of the analysis."""
        setting = public_numbers.EXACT[line]
        values = list(self.own(line, "best").values())
        return public_numbers.compared(values, setting.published[0], setting.spread)

    def over(self, one: str, other: str, key: str = "score") -> Difference:
        """Paired by seed, in points."""
        found = paired(self.own(one, key), self.own(other, key))
        assert found is not None
        return found

    def best_round(self, line: str) -> int:
        curve = self.rows[line, 0]["curve"]
        return 1 + curve.index(max(curve))

    @staticmethod
    def published(line: str, place: int = 0) -> float:
        return public_numbers.EVERY[line].published[place]

    @staticmethod
    def flower(line: str) -> str:
        """Flower's best round with its printed spread."""
        found = public_numbers.EVERY[line]
        return f"{found.published[0]:.1f} ± {found.spread:.1f}"

    def off(self, line: str, key: str, place: int = 0) -> str:
        """Ours minus the published figure: 0 is Flower's, 1 NIID-Bench's."""
        return f"{100 * self.rows[line, 0][key] - self.published(line, place):+.1f}"

    def tables(self) -> str:
        return public_numbers.report([row for row in self.all if row["line"] in public_numbers.LINES])

    def exact_tables(self) -> str:
        return public_numbers.exact_report(self.all, self.unfinished)


class Safl:
    """benchmarks/safl.py: of the GPU runs only these summaries were kept."""

    def __init__(self, folder: Path) -> None:
        names = ("safl", "safl_choice", "safl_words")
        self.found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
        self.cells = read(folder / "safl-cells.jsonl")
        self.adapters = json.loads((folder / "adapters.json").read_text())
        self.noise = json.loads((folder / "noise_in_sum_mtsamples.json").read_text())
        self.choice = layer_choice_report.Study(read(folder / layer_choice_report.NAME))

    def line(self, method: str, dataset: str, epsilon: float | None, name: str) -> Row:
        lines = self.found[name]["lines"]
        own = [x for x in lines if (x["method"], x["dataset"], x["epsilon"]) == (method, dataset, epsilon)]
        (found,) = own
        return dict(found)

    def f1(
        self, method: str, dataset: str = "mtsamples", epsilon: float | None = None, name: str = "safl_choice"
    ) -> str:
        return f"{100 * self.line(method, dataset, epsilon, name)['f1']:.1f}"

    def interval(
        self, method: str, dataset: str = "mtsamples", epsilon: float | None = None, name: str = "safl_choice"
    ) -> str:
        low, high = (100 * value for value in self.line(method, dataset, epsilon, name)["interval"])
        return f"{low:.1f} to {high:.1f}"

    def megabytes(self, method: str, name: str = "safl_choice") -> str:
        return f"{self.line(method, 'mtsamples', None, name)['bytes_up'] / 1e6:.0f}"

    def pair(self, other: str, dataset: str = "mtsamples", epsilon: float | None = None) -> Row:
        """SAFL less another method: the later study where both have it."""
        for name in ("safl_choice", "safl"):
            for pair in self.found[name]["pairs"]:
                if (pair["dataset"], pair["epsilon"]) == (dataset, epsilon) and pair["pair"].endswith(
                    f" {other}"
                ):
                    return dict(pair)
        raise KeyError(other)

    def less(self, other: str, dataset: str = "mtsamples", epsilon: float | None = None) -> str:
        pair = self.pair(other, dataset, epsilon)
        mean, low, high = (100 * pair[key] for key in ("mean", "low", "high"))
        return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"

    @cached_property
    def words(self) -> dict[str, Row]:
        """TF-IDF, computed here from every run's predictions."""
        given = safl.parse(_arguments(self.found["safl_words"]["command"]))
        cells = safl.Cells.of(self.cells, safl.setting(given))
        (group,) = safl.groups(given)
        lines, _ = safl.table(group, given, cells)
        return {line["method"]: line for line in lines}

    def word_f1(self, method: str) -> str:
        line = self.words[method]
        low, high = (100 * value for value in line["interval"])
        return f"{100 * line['f1']:.1f} ({low:.1f} to {high:.1f})"

    def other_budgets(self) -> list[Row]:
        """What other studies reach on MTSamples under a budget: data and model are the same, local training
        is not."""
        lines = self.adapters["lines"]
        private = [x for x in lines if x["study"] == "mtsamples" and x["title"] == "LoRA 16, ffa"]
        lora = [[x["epsilon"], x["score"]] for x in private if x["epsilon"] is not None]
        runs = {name: statistics.fmean(run["figures"]) for name, run in self.noise["runs"].items()}
        summed = [[epsilon, runs[f"sum, epsilon {epsilon}"]] for epsilon in (8, 2)]
        return [
            {"title": "LoRA 16, FFA (study of adapters)", "points": sorted(lora)},
            {"title": "head alone, noise in the sum", "points": sorted(summed)},
        ]

    def tables(self, name: str) -> str:
        found = self.found[name]
        return safl_report.report(found, safl.parse(_arguments(found["command"])))


def _arguments(command: str) -> list[str]:
    import shlex

    return shlex.split(command)[2:]


class PFedDC:
    """benchmarks/pfeddc.py; `fused` is the study whose fusion leaves the global prompt alive."""

    def __init__(self, folder: Path) -> None:
        names = ("pfeddc", "pfeddc_fused")
        self.found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}

    def scores(
        self, method: str, clients: int, key: str = "mean", share: float = 1.0, name: str = "pfeddc_fused"
    ) -> dict[int, float]:
        split = {count: split for split, count in pfeddc_report.CLIENTS.items()}[clients]
        cells = pfeddc_report.grouped(self.found[name]["cells"]).get((split, share, method), {})
        return {seed: 100 * cell["personal"][key] for seed, cell in cells.items()}

    def mean(self, method: str, clients: int, key: str = "mean") -> str:
        return f"{statistics.fmean(self.scores(method, clients, key).values()):.1f}"

    def less(
        self, one: str, other: str, clients: int, key: str = "mean", share: float = 1.0
    ) -> Difference | None:
        return paired(self.scores(one, clients, key, share), self.scores(other, clients, key, share))

    def fusion_family(self) -> dict[tuple[str, int], Difference]:
        """Cross-attention less the sum, on the six pairs of towers and federations."""
        found = {
            (tower, clients): self.less(f"{tower}, cross", f"{tower}, sum", clients)
            for tower in ("text", "vision", "both")
            for clients in (4, 12)
        }
        return {place: gain for place, gain in found.items() if gain is not None}

    def corrected(self, tower: str, clients: int) -> str:
        family = self.fusion_family()
        values = freezing.holm([gain.p for gain in family.values()])
        return f"{dict(zip(family, values, strict=True))[tower, clients]:.2g}"

    def admissible(self, method: str) -> int:
        """Trials whose fused prompt stays within ten norms of the global one."""
        trials = self.found["pfeddc_fused"]["trials"].items()
        own = [trial for key, trial in trials if json.loads(key)[0] == method]
        return sum(pfeddc_report.gap_of(trial) <= 10 for trial in own)

    def tables(self, name: str) -> str:
        return pfeddc_report.report(self.found[name], name)


class Methods:
    """benchmarks/methods.py."""

    def __init__(self, folder: Path) -> None:
        self.study, self.folder = methods_study.STUDIES["cifar10"], folder / "methods"
        self.found = methods_study.Found.of(self.study, self.folder)
        self.speed = json.loads((folder / "methods_speed.json").read_text())

    def gain(self, method: str, model: str, alpha: float) -> Difference | None:
        base = methods_study.LOCAL if methods_study.METHODS[method].personal else methods_study.FEDAVG
        return self.found.against(method, base, model, alpha)

    def shared_family(self) -> dict[tuple[str, str, float], Difference]:
        places = [
            (name, model, alpha)
            for name in self.study.methods
            if not methods_study.METHODS[name].personal and name != methods_study.FEDAVG
            for model in self.study.models
            for alpha in self.study.alphas
        ]
        found = {place: self.gain(*place) for place in places}
        return {place: gain for place, gain in found.items() if gain is not None}

    def surviving(self) -> list[str]:
        family = self.shared_family()
        kept = surviving(list(family.values()))
        return [
            f"{name} ({model}, Dirichlet {alpha:g}: {gain})"
            for ((name, model, alpha), gain), survives in zip(family.items(), kept, strict=True)
            if survives
        ]

    def tables(self) -> str:
        return methods_study.report(self.study, self.folder)

    def speed_table(self) -> str:
        return methods_study.speed_table(self.speed)


class Evidence:
    """Everything, by the names that templates use."""

    def __init__(self, folder: Path = RESULTS) -> None:
        maps = {name: MapStudy(name, folder / "regimes") for name in MAPS}
        self.long, self.short, self.cifar = maps["digits_long"], maps["digits"], maps["cifar10"]
        self.mtsamples, self.pacs, self.maps = maps["mtsamples"], maps["pacs"], maps
        self.cpu, self.tuning, self.public = Cpu(folder), Tuning(folder), Public(folder)
        self.noise = NoiseInSum(folder)
        self.safl, self.pfeddc, self.methods = Safl(folder), PFedDC(folder), Methods(folder)
        self.flamby, self.vessels = Flamby(folder), Vessels(folder)
        self.theory, self.adapters, self.speed = Theory(folder), Adapters(folder), Speed(folder)
        self.text, self.conformal = TextBaselines(folder), Conformal(folder)
        self.alerts = TwelveAlerts(folder)
        self.codecs, self.coded_link, self.paced = Codecs(folder), CodedLink(folder), PacedStudy(folder)
        listed = folder / "capsules.json"  # by page_capsule.py
        self.capsules = json.loads(listed.read_text()) if listed.exists() else {}

    def names(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return own | {"verdict": verdict, "surviving": surviving, "table": table, "last": LAST}


MAPS = ("digits_long", "digits", "cifar10", "mtsamples", "pacs")
__all__ = ["Evidence", "pooled", "replace", "verdict"]
