"""The field's methods side by side: on the same splits and seeds, with as many trials each; and their speed.

    python benchmarks/methods.py run cifar10 --data DIR --work outputs/methods --workers 3 --minutes 15
    python benchmarks/methods.py table cifar10
    python benchmarks/methods.py speed --data DIR

Every method has four trials for its own settings on every model and split: four rates, or two rates with two
values of its own constant. All train with SGD, because SCAFFOLD and FedNova ask for it.

A trial is judged on rows that are held out of the training set, in place of the test rows: a worker that
tries settings has no test row at all. It has a seed of its own, which no table reports. The chosen settings
then train from three seeds, and are judged on the test rows. What all clients share is judged on all test
rows, mean of the last evaluations; personal models by every client on its own rows, at the end, mean over
clients.

On a GPU the trials, and the seeds, of a method on both splits train beside one another in one stacked step
(`--stack`). Every cell is one line of `results/methods/STUDY.jsonl` or, for trials, `STUDY-trials.jsonl`.
Started again, the script goes on with what is missing, the most telling first.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cells import (
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
    load_data,
    mean_of_last,
    merge,
    paired,
    read,
    table,
    training_arguments,
)

RESULTS = Path(__file__).parent / "results" / "methods"
TRIAL_SEED = 100  # of no table
GLOBAL, PERSONAL = "global", "personal"
FEDAVG, LOCAL = "fedavg", "local"


@dataclass(frozen=True)
class Method:
    name: str
    words: tuple[str, ...]
    constants: tuple[str, ...] = ()  # the two values that are tried of its own constant, as overrides
    judged: str = GLOBAL  # by its shared model, by the clients' own, or by these `after` a round at home
    needs_attention: bool = False
    most: float = 1.6  # times FedAvg's round, on a GPU
    passes: int = 1  # over the data in a round, as its speed is taken
    timed: tuple[str, ...] = ()  # how it is held to one kind of round while its speed is taken

    @property
    def personal(self) -> bool:
        return self.judged != GLOBAL


def strategy(name: str, *constants: str, **more: Any) -> Method:
    words = more.pop("words", ())
    own = tuple(f"strategy.{word}" for word in constants)
    return Method(name, (f"strategy={name}", *words), own, **more)


def server_optimizer(name: str, *constants: str) -> Method:
    own = tuple(f"server_optimizer.{word}" for word in constants)
    return Method(f"fedavg + {name}", ("strategy=fedavg", f"server_optimizer={name}"), own)


# The most telling first: whoever is stopped has these.
METHODS = {
    method.name: method
    for method in (
        strategy(FEDAVG),
        strategy("scaffold"),
        strategy("fednova"),
        strategy("fedprox", "mu=0.01", "mu=0.1"),
        strategy("feddyn", "alpha=0.01", "alpha=0.1"),
        strategy("moon", "mu=1", "mu=5", most=3),
        server_optimizer("avgm", "beta=0.5", "beta=0.9"),
        server_optimizer("adam", "lr=0.003", "lr=0.01"),
        strategy(LOCAL, judged=PERSONAL),
        Method("fedavg, then one round at home", ("strategy=fedavg",), judged="after"),
        strategy("ditto", "lam=0.1", "lam=1", judged=PERSONAL, most=3),
        strategy("fedper", judged=PERSONAL),
        strategy(
            "fedrep", judged=PERSONAL, passes=2, timed=("strategy.head_epochs=1",)
        ),  # the head trains for a pass of its own
        strategy("fedbabu", judged=PERSONAL),
        strategy("apfl", "alpha=0.25", "alpha=0.75", judged=PERSONAL, most=3),
        strategy("private_attention", judged=PERSONAL, needs_attention=True),
        strategy(
            "fedfrozen",
            *("warmup_rounds=3", "warmup_rounds=15"),
            needs_attention=True,
            timed=("strategy.warmup_rounds=0",),
        ),
        strategy(
            "fedpart",
            *("full_rounds=5", "full_rounds=10"),
            timed=("strategy.full_rounds=0", "strategy.group_rounds=1000"),
        ),
        server_optimizer("yogi", "lr=0.003", "lr=0.01"),
        server_optimizer("adagrad", "lr=0.01", "lr=0.03"),
    )
}


@dataclass(frozen=True)
class Model:
    words: tuple[str, ...]
    rates: tuple[float, float, float, float]  # a method with a constant of its own tries those in the middle
    attention: bool = True


@dataclass(frozen=True)
class Study:
    name: str
    words: tuple[str, ...]
    models: dict[str, Model]
    methods: tuple[str, ...] = tuple(METHODS)
    alphas: tuple[float, ...] = (0.1, 0.5)
    rounds: int = 30
    local_steps: int = 50
    every: int = 2  # rounds from one evaluation of the shared model to the next
    seeds: int = 3


PLAIN = (
    *("dataset.client_validation=0", "track.tensorboard=false", "runtime.threads=1", "checkpoint.every=0"),
    *("runtime.runner=cohort", "runtime.compile=false"),
    # Said in full, because a strategy may bring its own.
    *("client=sgd", "client.momentum=0.9", "client.weight_decay=0", "client.lr_schedule=constant"),
)
STUDIES = {
    study.name: study
    for study in (
        Study(
            "cifar10",
            (
                *("dataset=parquet", "dataset.name=cifar10", "dataset.validation=0.1", "num_clients=10"),
                *("client.batch_size=32", "client.local_epochs=4", "client.precision=bf16"),
            ),
            {
                "cnn": Model(
                    ("model=simple_cnn", "+model.config.dropout=false"),
                    (0.003, 0.01, 0.03, 0.1),
                    attention=False,
                ),
                "vit": Model(
                    (
                        *("model=vit_cifar", "model.config.hidden_size=96"),
                        *("model.config.intermediate_size=192", "model.config.num_hidden_layers=4"),
                        "model.config.num_attention_heads=3",
                        "runtime.compile=true",  # a third of the time; the CNN gains nothing
                    ),
                    (0.01, 0.03, 0.1, 0.2),
                ),
            },
        ),
        # Seconds on a CPU: to see the script work.
        Study(
            "tiny",
            (
                *("dataset=digits", "dataset.limit=300", "dataset.validation=0.2", "num_clients=2"),
                *("client.batch_size=8", "client.local_epochs=1"),
            ),
            {
                "cnn": Model(
                    ("model=simple_cnn", "+model.config.dropout=false"),
                    (0.01, 0.03, 0.1, 0.3),
                    attention=False,
                ),
            },
            methods=(FEDAVG, "scaffold", "fedprox", LOCAL, "fedavg, then one round at home", "fedfrozen"),
            rounds=2,
            local_steps=2,
            every=1,
            seeds=2,
        ),
    )
}


# Cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The settings that a method is tried with; what is chosen is one of these."""

    lr: float
    constant: str = ""

    @property
    def words(self) -> Words:
        return [f"client.lr={self.lr:g}", *filter(None, [self.constant])]

    def __str__(self) -> str:
        own = self.constant.partition(".")[2]
        return f"lr {self.lr:g}" + (f", {own}" if own else "")


def trials(method: Method, model: Model) -> tuple[Trial, ...]:
    """As many for every method."""
    if not method.constants:
        return tuple(Trial(lr) for lr in model.rates)
    return tuple(Trial(lr, constant) for lr in model.rates[1:3] for constant in method.constants)


@dataclass(frozen=True)
class Cell:
    """One run."""

    study: str
    model: str
    alpha: float
    method: str
    trial: Trial
    seed: int
    tuning: bool = False

    @property
    def title(self) -> str:
        what = f"trial of {self.trial}" if self.tuning else f"{self.trial}, seed {self.seed}"
        return f"{self.model}, Dirichlet {self.alpha:g}, {self.method}, {what}"

    @property
    def shape(self) -> tuple[Any, ...]:
        """Runs of one shape can train beside one another."""
        return (self.model, self.method, self.tuning)

    @property
    def told(self) -> Row:
        """What its line says it is."""
        own = {"model": self.model, "alpha": self.alpha, "method": self.method, "seed": self.seed}
        return own | {"lr": self.trial.lr, "constant": self.trial.constant}

    def words(self, more: Sequence[str]) -> Words:
        study, method = STUDIES[self.study], METHODS[self.method]
        every = study.rounds if method.personal else study.every  # personal models are judged at the end
        return [
            *PLAIN,
            *study.words,
            *study.models[self.model].words,
            *method.words,
            *self.trial.words,
            *(
                f"partition.alpha={self.alpha}",
                f"seed={self.seed}",
                f"personal={str(method.personal).lower()}",
            ),
            *(f"num_rounds={study.rounds}", f"eval_every={every}", f"client.local_steps={study.local_steps}"),
            *more,
        ]

    def folder(self, work: Path) -> Path:
        parts = (self.study, *(str(part) for part in self.shape), f"{self.alpha:g}", *self.trial.words)
        name = "-".join((*parts, str(self.seed)))
        return work / "".join(letter if letter.isalnum() or letter in "-.=" else "_" for letter in name)


def plan_of(study: Study) -> Iterator[tuple[str, str, float]]:
    """Method, model, split, in the order in which they are tried and trained."""
    for name in study.methods:
        for model, made in study.models.items():
            if made.attention or not METHODS[name].needs_attention:
                yield from ((name, model, alpha) for alpha in study.alphas)


def cells_of(study: Study, rows: Sequence[Row], tried: Sequence[Row], seeds: int) -> list[Cell]:
    """What is missing, the most urgent first. A method waits for its trials on this model and split."""
    done = {identity(row) for row in rows}
    judged = {identity(row) for row in tried}
    found = []
    for name, model, alpha in plan_of(study):
        options = trials(METHODS[name], study.models[model])
        own = [Cell(study.name, model, alpha, name, trial, TRIAL_SEED, tuning=True) for trial in options]
        missing = [cell for cell in own if identity(cell.told) not in judged]
        if not missing:
            best = chosen(study, tried, name, model, alpha)
            own = [Cell(study.name, model, alpha, name, best, seed) for seed in range(seeds)]
            missing = [cell for cell in own if identity(cell.told) not in done]
        found += missing
    return found


def chosen(study: Study, tried: Sequence[Row], method: str, model: str, alpha: float) -> Trial:
    """The best on held-out rows; one that failed is the worst, and of equals the first is taken."""
    scores = {identity(row): row.get("val", -math.inf) for row in tried}
    options = trials(METHODS[method], study.models[model])
    cells = [Cell(study.name, model, alpha, method, trial, TRIAL_SEED) for trial in options]
    best = max(cells, key=lambda cell: scores.get(identity(cell.told), -math.inf))
    return best.trial


def identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "alpha", "method", "seed", "lr", "constant"))


def same_cell(a: Row, b: Row) -> bool:
    return identity(a) == identity(b)


# One group of runs ---------------------------------------------------------------------------------------


def measure(cells: Sequence[Cell], laboratory: Laboratory, work: Path, more: Sequence[str]) -> list[Row]:
    """Train these, which are of one shape, and make their lines."""
    began = time.perf_counter()
    runs = [(cell.words(more), cell.folder(work)) for cell in cells]
    first = cells[0]
    corpus = without_test_rows(laboratory.corpus, runs[0][0]) if first.tuning else laboratory.corpus
    outcomes = laboratory.train(runs, (first.model, first.tuning), set(), on=corpus)
    rows = [
        line_of(cell, outcome, folder)
        for cell, outcome, (_, folder) in zip(cells, outcomes, runs, strict=True)
    ]
    for _, folder in runs:
        shutil.rmtree(folder, ignore_errors=True)
    share = (time.perf_counter() - began) / len(cells)
    return [row | {"seconds": round(share, 2)} for row in rows]


_held_out: dict[int, Any] = {}


def without_test_rows(corpus: Any, words: Words) -> Any:
    """The same training rows, and in place of the test rows those that are held out of training."""
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.data.federated import share_out

    if id(corpus) not in _held_out:
        config = read(resolved(compose_config(words)))
        rows = share_out(corpus, config, config.num_clients).validation
        _held_out[id(corpus)] = replace(
            corpus,
            test=corpus.train.take(rows),
            test_strata=corpus.strata[rows],
            test_units=corpus.units[rows],
            test_columns={name: values[rows] for name, values in corpus.columns.items()},
        )
    return _held_out[id(corpus)]


def line_of(cell: Cell, outcome: tuple[list[Row], Row] | BaseException, folder: Path) -> Row:
    row = cell.told
    if isinstance(outcome, BaseException):
        if not is_result(outcome):
            raise outcome
        return row | {"failed": str(outcome)}
    rows, told = outcome
    judged = METHODS[cell.method].judged
    shared = [round(value, 4) for value in curve(rows, "test_accuracy")]
    found: Row = {"score": mean_of_last(shared)} if judged == GLOBAL else personal_figures(folder, judged)
    if cell.tuning:
        return row | {"val": found["score"]}  # on held-out rows, whatever the run calls them
    if judged == GLOBAL:
        found |= {"curve": shared, "every": STUDIES[cell.study].every}
    for way in ("up", "down"):
        found[f"megabytes_{way}"] = round(sum(each.get(f"bytes_{way}", 0) for each in rows) / 1e6, 2)
    return row | found | {"rounds": STUDIES[cell.study].rounds} | told


def personal_figures(folder: Path, judged: str) -> Row:
    """Over clients, each counting once."""
    figures = json.loads((folder / "personal.json").read_text())[judged]
    return {"score": round(figures["mean"], 5), "worst": round(figures["worst"], 5)}


class Schedule:
    """What is trained next, and whether there is still time for it."""

    def __init__(self, study: Study, options: argparse.Namespace) -> None:
        self.study, self.options, self.until = study, options, options.until
        self.files = {tuning: rows_file(study, options.rows, tuning) for tuning in (False, True)}
        self.rows = {tuning: read(path) for tuning, path in self.files.items()}
        self.given_up: set[Cell] = set()
        self.pace = Pace()

    def next(self, busy: set[Cell]) -> tuple[Cell, ...]:
        seeds = self.options.seeds or self.study.seeds
        shapes: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in cells_of(self.study, self.rows[False], self.rows[True], seeds):
            if cell not in busy and cell not in self.given_up:
                shapes.setdefault(cell.shape, []).append(cell)
        groups = (tuple(cells[: self.options.stack]) for cells in shapes.values())
        return next((group for group in groups if self.fits(group)), ())

    def fits(self, cells: Sequence[Cell]) -> bool:
        kind, steps = self._pace_of(cells)
        return time.time() + self.pace.expected(kind, steps, len(cells)) < self.until

    def take(self, cells: Sequence[Cell], rows: Sequence[Row] | str) -> None:
        if isinstance(rows, str):
            self.given_up.update(cells)
            print(rows, file=sys.stderr, flush=True)
            return
        self.pace.note(*self._pace_of(cells), rows)
        for cell, row in zip(cells, rows, strict=True):
            self.rows[cell.tuning].append(row)
            append(self.files[cell.tuning], row | {"commit": self.options.commit})

    def _pace_of(self, cells: Sequence[Cell]) -> tuple[Any, int]:
        return (cells[0].model, cells[0].method), self.study.rounds * self.study.local_steps


def rows_file(study: Study, folder: Path, tuning: bool) -> Path:
    return folder / f"{study.name}{'-trials' if tuning else ''}.jsonl"


# What came out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The lines of a study at the settings that its trials chose."""

    study: Study
    rows: tuple[Row, ...]
    tried: tuple[Row, ...]

    @classmethod
    def of(cls, study: Study, folder: Path) -> "Found":
        rows, tried = (read(rows_file(study, folder, tuning)) for tuning in (False, True))
        best = {
            place: chosen(study, tried, *place)
            for place in plan_of(study)
            if any(place_of(row) == place for row in tried)
        }
        current = [
            row
            for row in rows
            if (trial := best.get(place_of(row)))
            and (trial.lr, trial.constant) == (row["lr"], row["constant"])
        ]
        return cls(study, tuple(current), tuple(tried))

    def by_seed(self, method: str, model: str, alpha: float, key: str = "score") -> dict[int, float]:
        """In points (percent)."""
        place = (method, model, alpha)
        return {row["seed"]: 100 * row[key] for row in self.rows if place_of(row) == place and key in row}

    def settings(self, method: str, model: str, alpha: float) -> str:
        best = chosen(self.study, self.tried, method, model, alpha)
        options = trials(METHODS[method], self.study.models[model])
        edge = best.lr in (options[0].lr, options[-1].lr) and not best.constant
        return f"{best}{' (edge)' if edge else ''}"

    def against(self, method: str, other: str, model: str, alpha: float) -> Difference | None:
        return paired(self.by_seed(method, model, alpha), self.by_seed(other, model, alpha))

    def megabytes(self, method: str, model: str, alpha: float) -> float:
        own = [row for row in self.rows if place_of(row) == (method, model, alpha) and "failed" not in row]
        return statistics.fmean(row["megabytes_up"] + row["megabytes_down"] for row in own)


def place_of(row: Row) -> tuple[str, str, float]:
    return row["method"], row["model"], row["alpha"]


def mean_with_interval(values: Sequence[float]) -> str:
    """95 % by Student's t; without one for a single seed."""
    alone = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    return "" if alone is None else str(alone).removeprefix("+")


def unfinished(found: Found) -> list[str]:
    """Which methods have fewer seeds than the study asks for, by model."""
    lacking: dict[str, dict[str, None]] = {}
    for name, model, alpha in plan_of(found.study):
        own = [row for row in found.rows if place_of(row) == (name, model, alpha)]
        if len(own) < found.study.seeds:
            lacking.setdefault(model, {})[f"`{name}`"] = None
    return [f"{model}: {', '.join(names)}" for model, names in lacking.items()]


def report(study: Study, folder: Path) -> str:
    found = Found.of(study, folder)
    if not found.rows:
        return "No cell is there yet.\n"
    parts = [
        f"{study.rounds} rounds of at most {study.local_steps} local steps, SGD with momentum 0.9; mean over "
        "seeds in percent with a 95 % interval by Student's t, and in brackets the difference to the first "
        "line over the same seeds. `MB` is what all clients sent and were sent in a run."
    ]
    for model in study.models:
        for personal in (False, True):
            base = LOCAL if personal else FEDAVG
            names = [name for name in study.methods if METHODS[name].personal == personal]
            names = [base, *(name for name in names if name != base)]
            lines = [line for name in names if (line := line_of_table(found, name, base, model))]
            if not lines:
                continue
            what = "every client's own model on its own rows" if personal else "the shared model"
            splits = [
                head
                for alpha in study.alphas
                for head in (
                    f"Dirichlet {alpha:g}",
                    *(["worst client"] if personal else []),
                    "MB",
                    "chosen",
                )
            ]
            parts += [f"**{model}, {what}**", table(["method", "seeds", *splits], lines)]
    parts += ["\n".join(orderings(found))]
    failed = [row for row in found.rows if "failed" in row]
    if failed:
        said = "; ".join(
            f"{row['model']}, {row['alpha']}, {row['method']}, seed {row['seed']}" for row in failed
        )
        parts.append(f"Failed: {said}.")
    if missing := unfinished(found):
        parts.append(f"Not run to the end yet: {'; '.join(missing)}.")
    spent = sum(row["seconds"] for row in (*found.rows, *found.tried))
    parts.append(
        f"{len(found.rows)} runs and {len(found.tried)} trials, {spent / 60:.0f} minutes of workers' time."
    )
    return "\n\n".join(parts) + "\n"


def line_of_table(found: Found, name: str, base: str, model: str) -> list[str]:
    """Empty where the method has no run on this model."""
    line, seeds = [], 0
    for alpha in found.study.alphas:
        place = (name, model, alpha)
        own = found.by_seed(*place)
        personal = METHODS[name].personal
        if not own:
            line += [""] * (4 if personal else 3)
            continue
        seeds = max(seeds, len(own))
        difference = None if name == base else found.against(name, base, model, alpha)
        line.append(mean_with_interval([*own.values()]) + (f" ({difference})" if difference else ""))
        if personal:
            line.append(mean_with_interval([*found.by_seed(*place, key="worst").values()]))
        line += [f"{found.megabytes(*place):.0f}", found.settings(*place)]
    return [name, str(seeds), *line] if seeds else []


def orderings(found: Found) -> Iterator[str]:
    """What others report of SCAFFOLD and FedAvg under SGD, beside what is found here."""
    yield (
        "SCAFFOLD over FedAvg with SGD, as others have it: NVFLARE +2.1 points at Dirichlet 0.1 (CNN, 8 "
        "clients, 50 rounds), NIID-Bench +1.6 and Flower's `niid_bench` +5.6 at 0.5 (CNN, 10 clients, 50 "
        "rounds). Here:\n"
    )
    for model in found.study.models:
        for alpha in found.study.alphas:
            difference = found.against("scaffold", FEDAVG, model, alpha)
            if difference is None:
                yield f"- {model}, Dirichlet {alpha:g}: not measured."
                continue
            sure = difference.half < abs(difference.mean)
            word = "above" if difference.mean > 0 else "below"
            verdict = f"SCAFFOLD is {word} FedAvg" if sure else "not distinguished"
            seeds = f"{difference.seeds} seeds" if difference.seeds > 1 else "one seed"
            yield f"- {model}, Dirichlet {alpha:g}: {difference} points over {seeds}: {verdict}."


# Speed ---------------------------------------------------------------------------------------------------


def speed_words(options: argparse.Namespace) -> Words:
    words = [*PLAIN, "partition=iid", "num_clients=10", "client.batch_size=64", "client.local_epochs=1"]
    words += ["num_rounds=100000", "eval_every=100000", "client.lr=0.01", "dataset.validation=0"]
    if options.data is None:  # to see it work
        return [*words, "dataset=digits", "dataset.limit=700", "model=vit_tiny"]
    pictures = ["dataset=parquet", f"dataset.limit={options.images}", "client.precision=bf16"]
    return [*words, *pictures, f"dataset.path={options.data.resolve()}", "model=vit_cifar"]


def speed(options: argparse.Namespace) -> None:
    """Each method's round beside FedAvg's, in turns: the seconds of local work and of the server's step.

    The file is written after every method. Started again with the same setting, on a GPU of the same name,
    what is in it stays and the rest is measured; `--anew` measures those of `--methods`, or all, again.
    """
    from common import RESULTS as folder
    from common import show, spread, write_result
    from turns import AppTurns, unheard

    words = [*speed_words(options), f"device={options.device}", *options.set]
    names = options.methods or [name for name in METHODS if METHODS[name].judged != "after"]
    path = options.out or folder / "methods_speed.json"
    corpus = load_data([*words, "strategy=fedavg"])
    steps = math.ceil(math.ceil(len(corpus.train) / 10) / 64)  # of a client in a round
    setting = {"clients": 10, "batch": 64, "steps": steps, "words": portable(words)}
    result: Row = {"setting": setting, "repeats": options.repeats, "gpu": gpu_name()}
    figures = measured_before(path, result)
    missing = [name for name in names if options.anew or name not in figures]
    with unheard():
        base = AppTurns([*words, "strategy=fedavg"], corpus) if missing else None
        for name in missing:
            method = METHODS[name]
            own = AppTurns([*words, *method.words, *method.constants[:1], *method.timed], corpus)
            first = seconds_of(own)  # compiles and records
            seconds_of(base)
            pairs = [(seconds_of(own), seconds_of(base)) for _ in range(options.repeats)]
            own.close()
            release_memory()
            times = spread([mine / theirs for mine, theirs in pairs])
            figures[name] = {
                "first_round_seconds": first,
                "seconds": asdict(spread([mine for mine, _ in pairs])),
                "fedavg_seconds": asdict(spread([theirs for _, theirs in pairs])),
                "times_fedavg": asdict(times),
                "times_fedavg_a_step": asdict(spread([value / method.passes for value in times.values])),
                "at_most": method.most,
            }
            figures = {name: figures[name] for name in METHODS if name in figures}  # in the page's order
            write_result("methods_speed", result | {"figures": figures, "checks": met(figures)}, path)
            print(f"{name}: {times:.2f} times FedAvg's round", file=sys.stderr, flush=True)
        if base is not None:
            base.close()
    rows = []
    for name, one in figures.items():
        times = one["times_fedavg"]
        told = f"{times['median']:.2f} ({times['low']:.2f}–{times['high']:.2f})"
        rows.append((name, f"{1000 * one['seconds']['median']:.0f}", told))
    heads = ("", "ms a round", "times FedAvg's")
    show("A round beside FedAvg's: median (range)", heads, rows, met(figures), path)


def measured_before(path: Path, result: Row) -> dict[str, Row]:
    """The figures that the file has of this setting; a file of another one is left for the first figure."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = all(found.get(key) == json.loads(json.dumps(value)) for key, value in result.items())
    return dict(found["figures"]) if found and same else {}


def met(figures: dict[str, Row]) -> dict[str, bool]:
    return {
        f"{name}_at_most_{figure['at_most']:g}": figure["times_fedavg_a_step"]["median"] <= figure["at_most"]
        for name, figure in figures.items()
    }


def speed_table(result: Row) -> str:
    """Of the result file."""
    lines = []
    for name, figure in result["figures"].items():
        times, most = figure["times_fedavg"], figure["at_most"]
        over = f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})"
        a_step = f"{figure['times_fedavg_a_step']['median']:.2f}"
        lines.append([name, f"{1000 * figure['seconds']['median']:.0f}", over, a_step, f"{most:g}"])
    heads = ["method", "ms a round", "times FedAvg's: median (range)", "the same, a step", "at most"]
    where = result["gpu"] or result["machine"]["processor"] or "CPU"
    steps, repeats = result["setting"]["steps"], result["repeats"]
    said = f"{where}, {steps} steps a round, {repeats} rounds each. FedRep's head has steps of its own."
    return f"{said}\n\n{table(heads, lines)}"


def portable(words: Words) -> Words:
    """Without a path that is of no use elsewhere."""
    return ["dataset.path=DIR" if word.startswith("dataset.path=") else word for word in words]


def seconds_of(run: Any) -> float:
    seconds = run.turn()["seconds"]
    return float(seconds["train"] + seconds["aggregate"])


def release_memory() -> None:
    """Model, runner and step of a run that is over know each other: only this frees their device memory."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="try every method's settings, then train the chosen ones")
    command.add_argument("study", choices=STUDIES)
    command.add_argument("--methods", nargs="*", choices=METHODS, help="these alone, in this order")
    command.add_argument("--rows", type=Path, default=RESULTS, help="where the lines are kept")
    training_arguments(command, work="outputs/methods")
    command = commands.add_parser(
        "table", help="Markdown of what is there; the pages are written by recompute.py"
    )
    command.add_argument("study", choices=STUDIES)
    command.add_argument("--rows", type=Path, default=RESULTS, help="where the lines are kept")
    command = commands.add_parser("merge", help="take over cells from other folders")
    command.add_argument("others", type=Path, nargs="+")
    command.add_argument("--rows", type=Path, default=RESULTS, help="where the lines are kept")
    command = commands.add_parser("speed", help="each method's round over FedAvg's")
    command.add_argument("--data", type=Path, help="the folder of CIFAR-10's two parquet files; else digits")
    command.add_argument("--images", type=int, default=16000, help="training images, all clients together")
    command.add_argument("--repeats", type=int, default=9)
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--methods", nargs="*", choices=METHODS, help="these alone")
    command.add_argument("--set", nargs="*", default=[], help="more overrides")
    command.add_argument("--anew", action="store_true", help="measure again what the file has already")
    command.add_argument("--out", type=Path, help="another file for the result")
    options = parser.parse_args(words)
    if options.command == "speed":
        speed(options)
    elif options.command == "merge":
        merge(options.rows, options.others, same_cell)
    elif options.command == "table":
        print(report(STUDIES[options.study], options.rows))
    else:
        if options.study == "cifar10" and options.data is None:
            parser.error("cifar10 needs --data DIR")
        study, options = STUDIES[options.study], completed(options)
        study = replace(study, methods=tuple(options.methods)) if options.methods else study
        fill(Schedule(study, options), measure, [*PLAIN, *study.words], options)


if __name__ == "__main__":
    main()
