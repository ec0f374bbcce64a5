"""The map: where does freezing the attention kernel pay, and where does it cost?

    python benchmarks/regimes.py run digits --work outputs/regimes --workers 12 --minutes 60
    python benchmarks/regimes.py run cifar10 --data DIR --work outputs/regimes --workers 3 --minutes 60
    python benchmarks/regimes.py run mtsamples --data DIR --model DIR --work outputs/regimes
    python benchmarks/regimes.py report digits cifar10

A setting is a skew, a number of local steps, an optimiser and a participation. For each setting and seed,
FedAvg that never freezes is trained once; every warm-up length is a fork of that run, so that the common
rounds are paid once and differences are paired. Three controls stand beside them: `cosine` (never freezes,
the rate decays), `late` (frozen only while it is scored) and `last` (frozen in the last round alone): what
they gain too is calming, and not the kernel's doing.

Rates are chosen for FedAvg on the server's validation rows, with a seed that no table reports, and held for
all methods. The test rows have no say in it: tuning does not even write them down.

On a GPU, the seeds of a setting and method train beside one another in one stacked step, and other skews of
the same shape with them (`--stack`): each is the run that it would be alone.

Every cell is one line of `results/regimes/STUDY.jsonl`, appended when its run is over. Started again, the
script goes on with what is missing, the most telling first.
"""

import argparse
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cells import (
    LAST,
    Difference,
    Laboratory,
    Pace,
    Row,
    Words,
    append,
    completed,
    curve,
    fill,
    is_result,
    mean_of_last,
    merge,
    paired,
    read,
    scores,
    table,
    training_arguments,
)


def freezing(after: int) -> Words:
    return ["strategy=fedfrozen", f"strategy.warmup_rounds={after}"]


def half(cell: "Cell", last: bool) -> Words:
    """The kernel of the first or last half of the layers alone."""
    depth = STUDIES[cell.study].depth
    numbers = range(depth // 2, depth) if last else range(depth // 2)
    names = ",".join(f"kernel.{number}" for number in numbers)
    frozen = f"{{from:{cell.after + 1},name:frozen,freeze:[{names}]}}"
    return ["strategy=schedule", f"strategy.stages=[{{from:1,name:warmup}},{frozen}]"]


def frozen_part(scope: str) -> Callable[["Cell"], Words]:
    return lambda cell: [*freezing(cell.after), f"strategy.freeze_scope={scope}"]


# Beside the warm-ups: how much of a run is FedAvg's (percent), and what it does from there on. Those but the
# first answer a reviewer: is it the kernel, or any part of its size; the freeze, or any calming? They freeze
# after half of the run, where a frozen kernel costs least.
AUTO = "auto"
VARIANTS: dict[str, tuple[float, Callable[["Cell"], Words]]] = {
    AUTO: (0, lambda cell: ["strategy=fedfrozen", "strategy.warmup_rounds=auto"]),
    "values": (50, frozen_part("v")),
    "random": (50, frozen_part("random")),
    "qk+ln1": (50, frozen_part("qk+ln1")),
    "all but values": (50, frozen_part("train_value_only")),
    "first half": (50, lambda cell: half(cell, last=False)),
    "last half": (50, lambda cell: half(cell, last=True)),
    "all slower": (50, lambda cell: [*freezing(cell.rounds), f"client.lr={cell.lr / 10:g}"]),
    "fedprox": (0, lambda cell: ["strategy=fedprox"]),
    "fedadam": (0, lambda cell: ["strategy=fedavg", "server_optimizer=adam"]),
    "fedpart": (0, lambda cell: ["strategy=fedpart", f"strategy.full_rounds={cell.rounds // 5}"]),
}

# Never, and what `auto` watches is written down: its rule is judged from these figures.
WATCHED = ["strategy=fedfrozen", "strategy.warmup_rounds=auto", "strategy.warmup_threshold=-1e9"]


# What is run ---------------------------------------------------------------------------------------------

TUNING_SEED = 100  # of no table
RESULTS = Path(__file__).parent / "results" / "regimes"
NEVER, COSINE, LATE, LAST_ROUND = "never", "cosine", "late", "last"
# By passes: whoever is stopped has the first for all settings before the second for any.
# Variants come last.
PASSES = ((NEVER, "10 %", "50 %", "0 %", COSINE, LATE, LAST_ROUND), ("20 %", "5 %"), ("2 %",))
METHODS = tuple(method for methods in PASSES for method in methods)
EVERY_METHOD = (*METHODS, *VARIANTS)
BY_BYTES = ("10 %", "20 %", "50 %")
WARMUPS = ("0 %", "2 %", "5 %", "10 %", "20 %", "50 %")


@dataclass(frozen=True)
class Setting:
    alpha: float | None  # of the Dirichlet draw; None: IID
    local_steps: int
    optimizer: str = "adamw"
    participation: float = 1.0
    rate: float = 1.0  # times the rate that was chosen
    slice: int = 0  # 0: in the first slice of the map
    labels: int = 0  # a client has so many classes, in place of the Dirichlet draw
    headline: bool = False  # with all variants; else `auto` alone
    domains: bool = False  # a client has one domain of the data, in place of the Dirichlet draw
    seeds: int = 5  # more where a claim is made

    @property
    def skew(self) -> tuple[str, Words]:
        """How clients differ: in a table's words, and in a command's."""
        if self.domains:
            return "a domain a client", ["partition=domain", "num_clients=null"]
        if self.labels:
            title = f"{self.labels} label{'s' * (self.labels > 1)} a client"
            return title, ["partition=labels", f"partition.labels={self.labels}"]
        if self.alpha is None:
            return "IID", ["partition=iid"]
        return f"Dirichlet {self.alpha:g}", [f"partition.alpha={self.alpha}"]

    @property
    def name(self) -> str:
        more = {"adamw": "", "sgd": ", SGD"}[self.optimizer]
        more += f", participation {self.participation:g}" if self.participation < 1 else ""
        return f"{self.skew[0]}, {self.local_steps} steps{more}" + (
            f", rate x{self.rate:g}" if self.rate != 1 else ""
        )

    @property
    def methods(self) -> Words:
        return [*METHODS, *(VARIANTS if self.headline else [AUTO])]

    def seeds_of(self, method: str) -> int:
        return self.seeds if method in (*METHODS, AUTO) else 5

    @property
    def group(self) -> str:
        """What has a rate of its own."""
        return f"{self.optimizer}, {self.local_steps} steps"

    @property
    def words(self) -> Words:
        local = [f"client={self.optimizer}", f"client.local_steps={self.local_steps}"]
        return [*self.skew[1], *local, f"participation={self.participation}"]


@dataclass(frozen=True)
class Study:
    name: str
    words: tuple[str, ...]
    settings: tuple[Setting, ...]
    rounds: dict[int, int]  # by local steps
    evaluations: int  # a run has so many, or one a round
    epochs: dict[int, int]  # by local steps: so often a small client goes through its rows at most
    rates: dict[str, tuple[float, ...]]  # by optimiser
    block: int = 3  # seeds that are finished for all settings of a slice before others begin
    tuned_at: float = 0.1  # the Dirichlet alpha at which rates are chosen
    needs: tuple[str, ...] = ()  # folders that the command must name
    depth: int = 2  # layers of its model

    @property
    def seeds(self) -> int:
        return max(setting.seeds for setting in self.settings)

    def every(self, setting: Setting) -> int:
        return max(1, self.rounds[setting.local_steps] // self.evaluations)


# Nobody needs tensorboard's files; the rate is constant, or a fork would not be what the whole run is.
PLAIN = (
    *("num_clients=10", "dataset.client_validation=0", "track.tensorboard=false", "runtime.threads=1"),
    *("client.lr_schedule=constant", "runtime.compile=false"),
)
VIT_DIGITS = ("model=vit_tiny", "model.config.hidden_size=32", "model.config.intermediate_size=64")
VIT_CIFAR = (
    *("model.config.hidden_size=96", "model.config.intermediate_size=192"),
    *("model.config.num_hidden_layers=4", "model.config.num_attention_heads=3"),
)
STUDIES = {
    study.name: study
    for study in (
        Study(
            "cifar10",
            (
                "experiment=cifar10",
                *VIT_CIFAR,
                "client.batch_size=32",
                "client.precision=bf16",
                "dataset.validation=0.04",
            ),
            (
                Setting(0.05, 200, headline=True),
                Setting(0.1, 50, headline=True),
                Setting(None, 50),
                Setting(0.1, 50, optimizer="sgd"),
                Setting(0.05, 50, participation=0.3),
                Setting(0.3, 200),
                Setting(0.1, 10),
                Setting(0.02, 50, slice=1),
                Setting(1.0, 200, slice=1),
                Setting(0.05, 50, slice=1),
                Setting(0.02, 200, slice=1),
                Setting(0.05, 800, slice=1),
                Setting(0.1, 200, slice=2),
                Setting(0.3, 50, slice=2),
                Setting(1.0, 50, slice=2),
                Setting(None, 200, slice=2),
                Setting(0.1, 800, slice=2),
                Setting(0.05, 10, slice=2),
                Setting(0.05, 200, optimizer="sgd", slice=2),
                Setting(0.1, 50, participation=0.3, slice=2),
                Setting(0.05, 200, rate=0.33, slice=3),
                Setting(0.05, 200, rate=3.0, slice=3),
                Setting(0.1, 50, rate=0.33, slice=3),
                Setting(0.1, 50, rate=3.0, slice=3),
            ),
            # Equal totals: 5,000 steps, 33 passes over the data; 800 a round take twice that. Rates that were
            # tried at twice the length are kept: none was at an edge.
            rounds={10: 500, 50: 100, 200: 25, 800: 12},
            evaluations=25,
            epochs={10: 1, 50: 4, 200: 8, 800: 16},
            rates={"adamw": (1e-4, 3e-4, 1e-3), "sgd": (0.01, 0.03, 0.1)},
            block=10,
            needs=("data",),
            depth=4,
        ),
        Study(
            "digits",
            (*VIT_DIGITS, "client.batch_size=16", "dataset.validation=0.2"),
            (
                Setting(0.1, 40),
                Setting(0.1, 10),
                Setting(None, 10),
                Setting(0.05, 40),
                Setting(0.3, 40),
                Setting(0.1, 10, optimizer="sgd"),
                Setting(0.1, 10, participation=0.3),
                Setting(1.0, 10),
                Setting(0.05, 10, slice=1),
                Setting(0.3, 10, slice=1),
                Setting(None, 40, slice=1),
                Setting(0.1, 160, slice=1),
            ),
            rounds={10: 80, 40: 20, 160: 10},  # 800 steps; 160 a round take twice that
            evaluations=20,
            epochs={10: 5, 40: 20, 160: 40},
            rates={"adamw": (1e-3, 3e-3, 1e-2), "sgd": (0.03, 0.1, 0.3)},
        ),
        # The same three times as long, with a wider choice of rates: the runs above still rise when they end.
        Study(
            "digits_long",
            (*VIT_DIGITS, "client.batch_size=16", "dataset.validation=0.2"),
            (
                Setting(0.1, 40, headline=True, seeds=10),
                Setting(0.05, 40, headline=True, seeds=10),
                Setting(0.3, 40),
                Setting(None, 40),
                Setting(None, 40, labels=2, headline=True, seeds=10),
                Setting(None, 40, labels=1, seeds=10),
                Setting(0.1, 10),
                Setting(0.1, 160),
                Setting(0.02, 40, slice=1, seeds=10),
                Setting(1.0, 40, slice=1),
                Setting(0.1, 40, participation=0.3, slice=1, headline=True, seeds=10),
                Setting(0.1, 40, optimizer="sgd", slice=1),
                Setting(0.05, 10, slice=1),
                Setting(0.3, 10, slice=1),
                Setting(0.05, 160, slice=1),
                Setting(0.3, 160, slice=1),
                Setting(None, 10, slice=2),
                Setting(None, 160, slice=2),
                Setting(None, 160, labels=2, slice=2),
                Setting(0.05, 40, participation=0.3, slice=2, headline=True, seeds=10),
                Setting(0.1, 40, rate=0.33, slice=2),
                Setting(0.1, 40, rate=3.0, slice=2),
                Setting(0.05, 40, rate=0.33, slice=2),
                Setting(0.05, 40, rate=3.0, slice=2),
            ),
            rounds={10: 240, 40: 60, 160: 15},  # 2,400 steps
            evaluations=20,
            epochs={10: 5, 40: 20, 160: 40},
            rates={"adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "sgd": (0.01, 0.03, 0.1)},
            block=5,
        ),
        # Pretrained models, whose attention is learned already. No dropout, as in all others here.
        Study(
            "mtsamples",
            (
                *("dataset=mtsamples", "dataset.max_tokens=128", "model=checkpoint", "client.precision=bf16"),
                *("+model.config.hidden_dropout_prob=0", "+model.config.attention_probs_dropout_prob=0"),
                *("num_clients=8", "partition.min_size=4", "client.batch_size=32", "dataset.validation=0.1"),
            ),
            (
                Setting(0.1, 10),
                Setting(0.5, 10),
                Setting(0.1, 40),
                Setting(None, 10, slice=1),
                Setting(0.5, 40, slice=1),
            ),
            rounds={10: 40, 40: 10},  # 400 steps
            evaluations=20,
            epochs={10: 5, 40: 20},
            rates={"adamw": (3e-5, 1e-4, 3e-4)},
            block=5,
            needs=("data", "model"),
            depth=6,
        ),
        Study(
            "pacs",
            (
                *("dataset=parquet", "dataset.name=pacs", "dataset.image_size=84", "model=checkpoint"),
                *("num_clients=8", "client.precision=bf16", "client.batch_size=32", "dataset.limit=5000"),
            ),
            (
                Setting(None, 40, domains=True),
                Setting(0.1, 40),
                Setting(None, 10, domains=True, slice=1),
                Setting(0.1, 10, slice=1),
            ),
            rounds={10: 40, 40: 10},
            evaluations=20,
            epochs={10: 5, 40: 20},
            rates={"adamw": (1e-5, 3e-5, 1e-4)},
            block=5,
            needs=("data", "model"),
            depth=12,
        ),
        # Seconds on a CPU: to see the script work.
        Study(
            "tiny",
            (*VIT_DIGITS, "model.config.num_hidden_layers=1", "num_clients=3", "dataset.limit=200"),
            (
                Setting(0.3, 2, seeds=2),
                Setting(None, 2, seeds=2),
                Setting(0.3, 2, optimizer="sgd", slice=1, seeds=2),
            ),
            rounds={2: 10},
            evaluations=10,
            epochs={2: 1},
            rates={"adamw": (1e-3, 1e-2), "sgd": (0.1,)},
            depth=1,
        ),
    )
}


def after_of(method: str, rounds: int, every: int) -> int:
    if method.endswith("%"):
        return round(float(method[:-2]) * rounds / 100)
    if method in VARIANTS:
        return round(VARIANTS[method][0] * rounds / 100)
    return {LATE: max(rounds - LAST * every, 0), LAST_ROUND: rounds - 1}.get(method, rounds)


@dataclass(frozen=True)
class Cell:
    """One run. `lr` is given where rates are tried; else it is the one that was chosen."""

    study: str
    setting: Setting
    seed: int
    method: str
    lr: float
    tuning: bool = False

    @property
    def title(self) -> str:
        what = "rate tried" if self.tuning else self.method
        return f"{self.setting.name}, seed {self.seed}, lr {self.lr:g}, {what}"

    @property
    def rounds(self) -> int:
        return STUDIES[self.study].rounds[self.setting.local_steps]

    @property
    def after(self) -> int:
        """The rounds before the freeze; all of them where there is none."""
        return after_of(self.method, self.rounds, STUDIES[self.study].every(self.setting))

    @property
    def forks(self) -> bool:
        return 0 < self.after < self.rounds

    @property
    def steps(self) -> int:
        """What it costs: the local steps that are its own."""
        return (self.rounds - (self.after if self.forks else 0)) * self.setting.local_steps

    @property
    def checkpoints(self) -> set[int]:
        """The rounds from which others fork."""
        if self.tuning or self.method != NEVER:
            return set()
        others = (replace(self, method=method) for method in EVERY_METHOD)
        return {other.after for other in others if other.forks}

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.setting.name, self.seed, self.method, self.lr)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Runs of one shape can train beside one another."""
        own = self.setting
        return (own.group, own.participation, self.method, self.tuning, self.after, self.rounds)

    @cached_property
    def priority(self) -> tuple[int, ...]:
        """A slice's rates, then its settings pass by pass, each with a block of seeds."""
        study, own = STUDIES[self.study], self.setting
        settings = study.settings
        number = next((n for n, methods in enumerate(PASSES) if self.method in methods), len(PASSES))
        place = settings.index(own) if own in settings else 0
        block = own.slice if self.tuning else max(own.slice, self.seed // study.block)
        return (block, not self.tuning, number, place, EVERY_METHOD.index(self.method), self.seed)

    def run_folder(self, work: Path, method: str | None = None) -> Path:
        parts = (self.study, self.setting.name, f"{self.lr:g}", f"seed {self.seed}", method or self.method)
        return work / "-".join(parts).replace(" ", "_").replace(",", "").replace("%", "p")

    def checkpoint(self, work: Path) -> Path:
        return self.run_folder(work, NEVER) / "checkpoints" / str(self.after)

    @property
    def strategy(self) -> Words:
        if self.method in VARIANTS:
            return VARIANTS[self.method][1](self)
        return WATCHED if self.method == NEVER else freezing(self.after)

    def words(self, work: Path, more: Sequence[str]) -> Words:
        study = STUDIES[self.study]
        local = [f"client.lr={self.lr:g}", f"client.local_epochs={study.epochs[self.setting.local_steps]}"]
        length = [f"num_rounds={self.rounds}", f"eval_every={study.every(self.setting)}", f"seed={self.seed}"]
        if self.method == COSINE:
            local += ["client.lr_schedule=cosine", "client.lr_final=0.01"]
        fork = [f"from={self.checkpoint(work)}"] if self.forks else []
        every = ["checkpoint.every=1", f"checkpoint.keep={self.rounds}"]
        return [
            *PLAIN,
            *study.words,
            *self.setting.words,
            *local,
            *length,
            *every,
            *self.strategy,
            *fork,
            *more,
        ]


def cells_of(study: Study, rows: Sequence[Row], tuning: Sequence[Row], seeds: int) -> list[Cell]:
    """What is missing, the most urgent first. A setting waits until its group's rates have been tried."""
    tried = {(row["group"], row["lr"]) for row in tuning}
    missing = [cell for cell in tuning_cells(study) if (cell.setting.group, cell.lr) not in tried]
    open_groups = {cell.setting.group for cell in missing}
    done = {(row["setting"], row["seed"], row["method"], row["lr"]) for row in rows}
    for setting in study.settings:
        if setting.group in open_groups:
            continue
        lr = rate_for(setting, tuning)
        for seed in range(seeds):
            methods = [method for method in setting.methods if seed < setting.seeds_of(method)]
            own = [Cell(study.name, setting, seed, method, lr) for method in methods]
            by_after = {
                (cell.after, cell.method if cell.method in (COSINE, *VARIANTS) else None): cell
                for cell in reversed(own)
            }  # 2 % of 20 is 0 %
            missing += [cell for cell in by_after.values() if cell.key not in done]
    return sorted(missing, key=lambda cell: cell.priority)


def tuning_cells(study: Study) -> list[Cell]:
    groups = {(setting.optimizer, setting.local_steps): setting.slice for setting in reversed(study.settings)}
    found = []
    for (optimizer, steps), part in sorted(groups.items(), key=lambda item: (item[1], item[0])):
        setting = Setting(study.tuned_at, steps, optimizer, slice=part)
        found += [
            Cell(study.name, setting, TUNING_SEED, NEVER, lr, tuning=True) for lr in study.rates[optimizer]
        ]
    return found


def rate_for(setting: "Setting", tuning: Sequence[Row]) -> float | None:
    """The group's rate, scaled as the setting asks; None where none was tried yet."""
    if not any(row["group"] == setting.group for row in tuning):
        return None
    return float(f"{chosen_rate(tuning, setting.group) * setting.rate:.3g}")


def chosen_rate(tuning: Sequence[Row], group: str) -> float:
    """The best of FedAvg on validation rows; a rate at which it fails is the worst."""
    own = [row for row in tuning if row["group"] == group]
    return max(own, key=lambda row: (row.get("val", -math.inf), -row["lr"]))["lr"]


# One run -------------------------------------------------------------------------------------------------


def measure(cells: Sequence[Cell], laboratory: Laboratory, work: Path, more: Sequence[str]) -> list[Row]:
    """Train these, which are of one shape, and make their lines."""
    began = time.perf_counter()
    runs = [(cell.words(work, more), cell.run_folder(work)) for cell in cells]
    kind, wanted = cells[0].setting.group, cells[0].checkpoints
    rows = [
        line_of(cell, outcome)
        for cell, outcome in zip(cells, laboratory.train(runs, kind, wanted), strict=True)
    ]
    if not wanted:
        for _, folder in runs:
            shutil.rmtree(folder, ignore_errors=True)
    share = (time.perf_counter() - began) / len(cells)
    return [row | {"seconds": round(share, 2)} for row in rows]


def line_of(cell: Cell, outcome: tuple[list[Row], Row] | BaseException) -> Row:
    """A tuning run's line knows validation rows alone."""
    row: Row = {"setting": cell.setting.name, "seed": cell.seed, "method": cell.method, "lr": cell.lr}
    row |= {"rounds": cell.rounds, "after": cell.after}
    if cell.tuning:
        row |= {"group": cell.setting.group}
    if isinstance(outcome, BaseException):
        if not is_result(outcome):
            raise outcome
        return row | {"failed": str(outcome)}
    rows, told = outcome
    row |= {"val": mean_of_last(curve(rows, "val_accuracy"))}
    if not cell.tuning:
        row["curve"] = [round(value, 4) for value in curve(rows, "test_accuracy")]
        row["every"] = STUDIES[cell.study].every(cell.setting)
        if cell.method == NEVER:
            row |= told  # of the data, which forks share
            row |= {"drift": drifts(rows), "watched": [watched(r) for r in rows if "warmup" in r]}
        if cell.method == AUTO:
            row["froze"] = next((r["round"] - 1 for r in rows if r["stage"] == "frozen"), None)
        row["megabytes"] = round(sum(r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in rows) / 1e6, 1)
    return row


def watched(row: Row) -> list[float | None]:
    """The round's training loss, and the kernel's agreement and drift."""
    figures = [row["train_loss"], *(row["warmup"][key] for key in ("agreement", "drift"))]
    return [None if value is None else float(f"{value:.3g}") for value in figures]


def drifts(rows: Sequence[Row], points: int = 16) -> list[list[float | None]]:
    """At some rounds: round, then of kernel and rest the clients' disagreement and their common movement."""
    trained = [row for row in rows if row["round"] and "drift" in row]
    picked = trained[:: max(1, len(trained) // points)]
    found = []
    for row in picked:
        figures = [
            row["drift"].get(part, {}).get(key)
            for part in ("kernel", "rest")
            for key in ("rms", "mean_update")
        ]
        found.append([row["round"], *(None if value is None else float(f"{value:.4g}") for value in figures)])
    return found


class Schedule:
    """Who trains what next, and whether there is still time for it."""

    def __init__(self, study: Study, options: argparse.Namespace, until: float) -> None:
        self.study, self.options, self.until = study, options, until
        self.rows, self.tuning = read(options.rows / f"{study.name}.jsonl"), read(tuning_file(study, options))
        self.given_up: set[Cell] = set()
        self.made: set[tuple[Setting, int]] = set()  # whole runs of this call
        self.pace = Pace()  # by group and participation

    def next(self, busy: set[Cell]) -> tuple[Cell, ...]:
        """The most urgent that can start and will end in time, with others of its shape; empty: none."""
        missing = cells_of(self.study, self.rows, self.tuning, self.options.seeds or self.study.seeds)
        whole = {(cell.setting, cell.seed) for cell in (*missing, *busy) if cell.method == NEVER}
        ready: dict[Cell, None] = {}  # each once, in order
        for cell in missing:
            if self.options.command == "tune" and not cell.tuning:
                continue
            if cell.forks and (cell.setting, cell.seed) in whole:  # it is still to come, or under way
                continue
            if cell.forks and not cell.checkpoint(self.options.work).exists():
                if (cell.setting, cell.seed) in self.made:  # and yet they are not there: once is enough
                    continue
                cell = replace(cell, method=NEVER)  # made again, for its checkpoints
            if cell not in busy and cell not in self.given_up:
                ready[cell] = None
        shapes: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in sorted(ready, key=lambda cell: cell.priority):
            shapes.setdefault(cell.shape, []).append(cell)
        groups = (tuple(cells[: self.options.stack]) for cells in shapes.values())
        return next((group for group in groups if self.fits(group)), ())

    def fits(self, cells: Sequence[Cell]) -> bool:
        first = cells[0]
        kind = (first.setting.group, first.setting.participation)
        return time.time() + self.pace.expected(kind, first.steps, len(cells)) < self.until

    def take(self, cells: Sequence[Cell], rows: Sequence[Row] | str) -> None:
        """A text is why the worker broke."""
        if isinstance(rows, str):
            self.given_up.update(cells)
            print(rows, file=sys.stderr, flush=True)
            return
        first = cells[0]
        self.pace.note((first.setting.group, first.setting.participation), first.steps, rows)
        for cell, row in zip(cells, rows, strict=True):
            if cell.method == NEVER:
                self.made.add((cell.setting, cell.seed))
            known, path = (
                (self.tuning, tuning_file(self.study, self.options))
                if cell.tuning
                else (self.rows, self.options.rows / f"{self.study.name}.jsonl")
            )
            if not any(same_cell(row, other) for other in known):  # a prefix made again is no new cell
                known.append(row)
                append(path, row | {"commit": self.options.commit})


def tuning_file(study: Study, options: argparse.Namespace) -> Path:
    return options.rows / f"{study.name}-rates.jsonl"


def same_cell(a: Row, b: Row) -> bool:
    return all(a[key] == b[key] for key in ("setting", "seed", "method", "lr"))


# What came out -------------------------------------------------------------------------------------------


class Scored(list[Row]):
    """Rows by cell: a report asks for each cell many times."""

    @cached_property
    def cells(self) -> dict[tuple[str, str], list[Row]]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self:
            found.setdefault((row["setting"], row["method"]), []).append(row)
        return found


def by_seed(rows: Sequence[Row], setting: str, method: str, key: str) -> dict[int, float]:
    """In points (percent)."""
    cells = rows.cells if isinstance(rows, Scored) else Scored(rows).cells
    return {row["seed"]: 100 * row[key] for row in cells.get((setting, method), ()) if key in row}


def against_never(rows: Sequence[Row], setting: str, method: str, key: str) -> Difference | None:
    """`last` is judged by the last round alone, in which alone it differs."""
    key = "final" if (method, key) == (LAST_ROUND, "score") else key
    return paired(by_seed(rows, setting, method, key), by_seed(rows, setting, NEVER, key))


def fill_shared(rows: Sequence[Row]) -> list[Row]:
    """Two warm-ups that are the same number of rounds are one run: it counts for both."""
    found = list(rows)
    there = {(row["setting"], row["seed"], row["method"]) for row in rows}
    for row in rows:
        frozen = row["after"] < row["rounds"] and row["method"] in (*WARMUPS, LATE, LAST_ROUND)
        for method in (*WARMUPS, LATE) if frozen else ():
            same = after_of(method, row["rounds"], row["every"]) == row["after"]
            if same and (row["setting"], row["seed"], method) not in there:
                there.add((row["setting"], row["seed"], method))
                found.append(row | {"method": method})
    return found


def at_chosen_rates(study: Study, rows: Sequence[Row], tuning: Sequence[Row]) -> list[Row]:
    """Without cells of a rate that a wider choice has replaced: they must not be paired with later ones."""
    rates = {setting.name: rate_for(setting, tuning) for setting in study.settings}
    return [row for row in rows if row["setting"] in rates and row["lr"] == rates[row["setting"]]]


def scored(study: Study, folder: Path) -> Scored:
    """The rows that count. What follows from a row's evaluations is not in its file, which stays small."""
    tuning = read(folder / f"{study.name}-rates.jsonl")
    rows = [row for row in read(folder / f"{study.name}.jsonl") if "failed" not in row]
    rows = [row | scores(row["curve"]) for row in rows]
    return Scored(fill_shared(at_chosen_rates(study, rows, tuning)))


def report(study: Study, folder: Path) -> str:
    raw, tuning = read(folder / f"{study.name}.jsonl"), read(folder / f"{study.name}-rates.jsonl")
    failed = [row for row in raw if "failed" in row]
    count, spent = len(raw), sum(row["seconds"] for row in (*raw, *tuning))
    rows = scored(study, folder)
    names = [setting.name for setting in study.settings if by_seed(rows, setting.name, NEVER, "score")]
    if not names:
        return f"## {study.name}\n\nNo cell is there yet.\n"
    methods = (*WARMUPS, LATE, LAST_ROUND, COSINE)
    parts = [
        f"## {study.name}",
        "Rates, chosen for FedAvg on validation rows with a seed that is not reported:",
    ]
    parts.append(table(["group", "tried: validation accuracy, %", "chosen"], list(rate_lines(study, tuning))))
    parts.append(
        f"Mean test accuracy of the last {LAST} evaluations in percent: never frozen (FedAvg), and the "
        "paired difference of each method to it in points, with a 95 % interval by Student's t over seeds "
        "(none with one seed). `late`: frozen only while it is scored; `last`: in the last round, whose "
        "accuracy is compared; `cosine`: never frozen, decaying rate. `rise`: FedAvg's last quarter less the "
        "one before. An empty cell was not run."
    )
    head = ["setting", "classes a client", "seeds", "never", "rise", *methods]
    parts.append(table(head, [line(rows, name, methods, "score") for name in names]))
    parts.append(
        "At equal bytes: the same against FedAvg stopped when it has sent as much as the frozen run sends in "
        "all its rounds (both ways), by the evaluations before:"
    )
    head_bytes = ["setting", *(f"{m} (share of FedAvg's bytes)" for m in BY_BYTES)]
    parts.append(table(head_bytes, [[name, *equal_bytes_line(rows, name)] for name in names]))
    parts.append("The swing (an evaluation's standard deviation in the second half), the same way:")
    parts.append(table(head, [line(rows, name, methods, "swing") for name in names]))
    parts.append("The worst drop from one evaluation to the next in the second half, the same way:")
    parts.append(table(head, [line(rows, name, methods, "worst_drop") for name in names]))
    parts.append("Rounds until 95 % of FedAvg's own score, medians over seeds (- where not reached):")
    parts.append(
        table(["setting", NEVER, *methods], [target_line(rows, name, (NEVER, *methods)) for name in names])
    )
    if judged := [own for name in names if (own := auto_line(rows, name)) is not None]:
        parts.append(
            "`auto` over never, over the better of never and the best fixed warm-up (of the highest mean, "
            "chosen after the fact), and after how many rounds it froze, medians over seeds:"
        )
        head = ["setting", "seeds", "best fixed", "its gain", "auto's gain", "auto to the better", "froze"]
        parts.append(table(head, judged))
    others = [method for method in VARIANTS if method != AUTO]
    if tried := [name for name in names if any(by_seed(rows, name, m, "score") for m in others)]:
        parts.append(
            "Other ways, points over never, all on the same five seeds: half of a run is FedAvg's, then "
            "other parts than the kernel are frozen, or all rates fall to a tenth; and the field's methods "
            "from the start, by their defaults:"
        )
        five = Scored(row for row in rows if row["seed"] < 5)
        shown = ["50 %", *others]
        parts.append(
            table(
                ["setting", *(f"kernel, {m}" if m == "50 %" else m for m in shown)],
                [
                    [name, *(str(against_never(five, name, m, "score") or "") for m in shown)]
                    for name in tried
                ],
            )
        )
        parts.append("The same seeds, another frozen part less the kernel, with p of the single comparison:")
        parts.append(table(["setting", *PARTS], [part_line(rows, name) for name in tried]))
    if len(names) > 5:
        parts.append(
            "What predicts a gain? Spearman's correlation over these settings of each gain with what "
            "FedAvg's own runs show: the clients' disagreement beside their common movement (of kernel and "
            "rest, in the second half of a run), the kernel's share of the disagreement, swing, rise, and "
            "classes a client:"
        )
        parts.append(table(["gain of", *PREDICTORS], list(predictor_lines(rows, names))))
    verdicts = list(significant(rows, names))
    parts.append(
        "Warm-ups that differ from never, Holm-corrected over this study's "
        f"{len(tests(rows, names, WARMUPS))} warm-up runs with 5 seeds or more (lengths that are the same "
        "run are one test):"
    )
    parts.append("\n".join(verdicts) if verdicts else "none.")
    if failed:
        parts.append(
            "Failed: " + "; ".join(f"{r['setting']}, seed {r['seed']}, {r['method']}" for r in failed)
        )
    parts.append(f"{count} cells, {spent / 60:.0f} minutes of workers' time.")
    return "\n\n".join(parts) + "\n"


PARTS = ("random", "values", "qk+ln1", "all but values", "first half", "last half")


def part_line(rows: Sequence[Row], name: str) -> list[str]:
    kernel = by_seed(rows, name, "50 %", "score")
    found = [paired(by_seed(rows, name, part, "score"), kernel) for part in PARTS]
    return [name, *("" if gain is None else f"{gain} (p = {gain.p:.2g})" for gain in found)]


def rate_lines(study: Study, tuning: Sequence[Row]) -> Iterator[list[str]]:
    for group in dict.fromkeys(row["group"] for row in tuning):
        own = sorted((row["lr"], row.get("val")) for row in tuning if row["group"] == group)
        best = chosen_rate(tuning, group)
        edge = " (edge of the grid)" if best in (own[0][0], own[-1][0]) and len(own) > 2 else ""
        tried = ", ".join(f"{lr:g}: {'failed' if val is None else f'{100 * val:.1f}'}" for lr, val in own)
        yield [group, tried, f"{best:g}{edge}"]


def line(rows: Sequence[Row], name: str, methods: Sequence[str], key: str) -> list[str]:
    never = by_seed(rows, name, NEVER, key)
    rise = statistics.fmean(by_seed(rows, name, NEVER, "rise").values())
    classes = statistics.fmean(by_seed(rows, name, NEVER, "classes_per_client").values()) / 100
    cells = [against_never(rows, name, method, key) for method in methods]
    shown = ["" if cell is None else str(cell) for cell in cells]
    return [
        name,
        f"{classes:.1f}",
        str(len(never)),
        f"{statistics.fmean(never.values()):.1f}",
        f"{rise:+.1f}",
        *shown,
    ]


def equal_bytes_line(rows: Sequence[Row], name: str) -> Iterator[str]:
    never = {row["seed"]: row for row in rows if (row["setting"], row["method"]) == (name, NEVER)}
    for method in BY_BYTES:
        own = [row for row in rows if (row["setting"], row["method"]) == (name, method)]
        pairs = [(row, never[row["seed"]]) for row in own if row["seed"] in never]
        gain = paired(
            {row["seed"]: 100 * row["score"] for row, _ in pairs},
            {row["seed"]: 100 * mean_of_last(cut(other, row["megabytes"])) for row, other in pairs},
        )
        share = [row["megabytes"] / other["megabytes"] for row, other in pairs]
        yield "" if gain is None else f"{gain} ({statistics.fmean(share):.2f})"


def cut(row: Row, megabytes: float) -> list[float]:
    """The evaluations of a run until it has sent so much; every round of FedAvg sends the same."""
    count = int(len(row["curve"]) * min(1.0, megabytes / row["megabytes"]))
    return row["curve"][: max(1, count)]


def late_mean(row: Row, figure: Callable[[float, float, float, float], float]) -> float:
    """Over the second half of a run's drifts, of kernel and rest: disagreement, common movement."""
    late = row["drift"][len(row["drift"]) // 2 :]
    return statistics.fmean(figure(*drift[1:]) for drift in late)


PREDICTORS: dict[str, Callable[[Row], float]] = {
    "kernel's drift": lambda row: late_mean(row, lambda own, common, rest, all_rest: own / common),
    "rest's drift": lambda row: late_mean(row, lambda own, common, rest, all_rest: rest / all_rest),
    "kernel's share": lambda row: late_mean(row, lambda own, common, rest, _: own**2 / (own**2 + rest**2)),
    "swing": lambda row: row["swing"],
    "rise": lambda row: row["rise"],
    "classes": lambda row: row["classes_per_client"],
}


def predictor_lines(rows: Sequence[Row], names: Sequence[str]) -> Iterator[list[str]]:
    from scipy.stats import spearmanr

    whole = {name: [r for r in rows if (r["setting"], r["method"]) == (name, NEVER)] for name in names}
    for method in ("50 %", LATE, COSINE):
        gains = {n: d.mean for n in names if (d := against_never(rows, n, method, "score")) is not None}
        if len(gains) < 5:
            continue
        told = []
        for figure in PREDICTORS.values():
            means = [statistics.fmean(figure(row) for row in whole[name]) for name in gains]
            told.append(f"{spearmanr(means, list(gains.values())).statistic:+.2f}")
        yield [method, *told]


def auto_line(rows: Sequence[Row], name: str) -> list[str] | None:
    gain = against_never(rows, name, AUTO, "score")
    if gain is None:
        return None
    fixed = {m: d for m in WARMUPS if (d := against_never(rows, name, m, "score")) is not None}
    best = max(fixed, key=lambda method: fixed[method].mean)
    better = best if fixed[best].mean > 0 else NEVER
    to_better = paired(by_seed(rows, name, AUTO, "score"), by_seed(rows, name, better, "score"))
    own = [row for row in rows if (row["setting"], row["method"]) == (name, AUTO)]
    froze = statistics.median(math.inf if row["froze"] is None else row["froze"] for row in own)
    where = "never" if math.isinf(froze) else f"{froze:g} of {own[0]['rounds']}"
    return [name, str(gain.seeds), best, str(fixed[best]), str(gain), str(to_better), where]


def target_line(rows: Sequence[Row], name: str, methods: Sequence[str]) -> list[str]:
    goals = {seed: 0.95 * score / 100 for seed, score in by_seed(rows, name, NEVER, "score").items()}
    shown = []
    for method in methods:
        own = [
            row for row in rows if (row["setting"], row["method"]) == (name, method) and row["seed"] in goals
        ]
        shown.append(f"{statistics.median(reached(row, goals[row['seed']]) for row in own):g}" if own else "")
    return [name, *(text.replace("inf", "-") for text in shown)]


def reached(row: Row, goal: float) -> float:
    return next((row["every"] * (n + 1) for n, value in enumerate(row["curve"]) if value >= goal), math.inf)


def tests(
    rows: Sequence[Row], names: Sequence[str], methods: Sequence[str]
) -> list[tuple[str, str, Difference]]:
    """A family for Holm's correction: lengths that are one and the same run are one test, under one title."""
    cells = rows.cells if isinstance(rows, Scored) else Scored(rows).cells
    found: dict[tuple[str, Any], tuple[list[str], Difference]] = {}
    for name in names:
        for method in methods:
            difference = against_never(rows, name, method, "score")
            if difference is None or difference.seeds < 5:
                continue
            own = cells[(name, method)]
            fixed = method in (*WARMUPS, LATE)
            run = (name, own[0]["after"] if fixed else method)
            found.setdefault(run, ([], difference))[0].append(method)
    return [(name, " = ".join(titles), difference) for (name, _), (titles, difference) in found.items()]


def significant(rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    """Holm 1979 over all warm-ups in all settings: the k-th smallest p of m counts m - k + 1 times."""
    family = sorted(tests(rows, names, WARMUPS), key=lambda test: test[-1].p)
    worst = 0.0
    for place, (name, method, difference) in enumerate(family):
        worst = max(worst, difference.p * (len(family) - place))
        if worst < 0.05:
            yield f"- {name}, {method}: {difference} points, p = {worst:.2g} (Holm), {difference.seeds} seeds"


def skew_of(rows: Sequence[Row], setting: Setting) -> float:
    return statistics.fmean(by_seed(rows, setting.name, NEVER, "classes_per_client").values()) / 100


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "choose what rates are missing, then train"), ("tune", "choose rates alone")):
        command = commands.add_parser(name, help=text)
        command.add_argument("study", choices=STUDIES)
        training_arguments(command, work="outputs/regimes")
    command = commands.add_parser(
        "report", help="Markdown of what is there; the pages are written by recompute.py"
    )
    command.add_argument("studies", nargs="+", choices=STUDIES)
    command = commands.add_parser("merge", help="take over cells from other folders")
    command.add_argument("others", type=Path, nargs="+")
    for command in commands.choices.values():
        command.add_argument("--rows", type=Path, default=RESULTS, help="where the lines are kept")
    options = parser.parse_args(words)
    if options.command == "merge":
        merge(options.rows, options.others, same_cell)
    elif options.command == "report":
        for name in options.studies:
            print(report(STUDIES[name], options.rows))
    else:
        study, options = STUDIES[options.study], completed(options)
        for need in study.needs:
            if getattr(options, need) is None:
                parser.error(f"{study.name} needs --{need} DIR")
        fill(Schedule(study, options, options.until), measure, study.words, options)


if __name__ == "__main__":
    main()
