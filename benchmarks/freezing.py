"""Does freezing the attention kernel still gain when rate and schedule are tuned?

    python benchmarks/freezing.py run --workers 5 --stack 10 --minutes 20
    python benchmarks/freezing.py report

Design and analysis are in docs/results/appendix/freezing-under-tuning.md, written before the first run.

Each run is one row of `results/regimes/freezing.jsonl`, appended when the run ends. Started again, the script
continues with the missing runs. A frozen run is a fork of the run that never freezes. The exponential moving
average of the global model is evaluated beside the model itself; it does not change training.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
    table,
    training_arguments,
)

SEEDS = range(111, 121)  # earlier studies have 0 to 9, and 100 for rates; a trial of this script 101, 102
ROUNDS, EVALUATIONS = 60, 20
RATE = 0.01  # client.lr of both experiments
RATES = {"1": RATE, "1/3": 0.00333, "1/10": 0.001}
SCHEDULES = ("constant", "cosine")
EXPERIMENTS = ("digits_few", "digits_drift")
FEW, DRIFT = EXPERIMENTS
NEVER = "never"
FREEZES = ("50 %", "20 %", "75 %")  # in the order in which they are run
SHOWN = ("20 %", "50 %", "75 %")
CONTROLS = {"random": "random matrices", "v": "values"}  # Study B, by strategy.freeze_scope
CONTROLLED = ("50 %", "20 %")
DECAY = 0.9  # of the server average, per round
TESTED = 5  # seeds that a comparison needs
TIE = 1.0  # points
RESULTS = Path(__file__).parent / "results" / "regimes"
NAME = "freezing.jsonl"
PLAIN = (
    *("track.tensorboard=false", "runtime.threads=1", "runtime.compile=false", "checkpoint.every=1"),
    "strategy=fedfrozen",
)

# What is run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run."""

    experiment: str
    schedule: str
    rate: str
    freeze: str
    scope: str
    seed: int
    rounds: int = ROUNDS

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.experiment, self.schedule, self.rate, self.freeze, self.scope, self.seed)

    @property
    def title(self) -> str:
        part = "" if self.scope == "qk" else f" ({CONTROLS[self.scope]})"
        return f"{self.experiment} {self.schedule} x{self.rate} {self.freeze}{part} seed {self.seed}"

    @property
    def after(self) -> int:
        """The rounds before the freeze."""
        if self.freeze == NEVER:
            return self.rounds
        return round(float(self.freeze.removesuffix(" %")) * self.rounds / 100)

    @property
    def forks(self) -> bool:
        return self.after < self.rounds

    @property
    def whole(self) -> "Cell":
        """The run from which it forks."""
        return replace(self, freeze=NEVER, scope="qk")

    @property
    def checkpoints(self) -> set[int]:
        """The rounds from which others fork."""
        return set() if self.forks else {replace(self, freeze=freeze).after for freeze in FREEZES}

    @property
    def steps(self) -> int:
        return self.rounds - self.after if self.forks else self.rounds

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells of one group train in one stacked step: those that differ only by seed. Random matrices
        differ between seeds, and each run then has a step of its own: half of the seeds per process."""
        half = self.seed % 2 if self.scope == "random" else 0
        return (*self.key[:-1], self.rounds, half)

    @property
    def priority(self) -> tuple[int, ...]:
        order = (NEVER, *FREEZES)
        return (
            EXPERIMENTS.index(self.experiment),
            SCHEDULES.index(self.schedule),
            list(RATES).index(self.rate),
            ("qk", *CONTROLS).index(self.scope),
            order.index(self.freeze),
            self.seed,
        )

    def folder(self, work: Path) -> Path:
        parts = (*self.key, self.rounds)
        return work / "-".join(str(part) for part in parts).replace(" %", "p").replace("/", "_")

    def checkpoint(self, work: Path) -> Path:
        return self.whole.folder(work) / "checkpoints" / str(self.after)

    def words(self, work: Path, more: Sequence[str]) -> Words:
        local = [f"client.lr={RATES[self.rate]:g}", f"client.lr_schedule={self.schedule}"]
        length = [f"num_rounds={self.rounds}", f"eval_every={every(self.rounds)}"]
        length += [f"checkpoint.keep={self.rounds}", f"seed={self.seed}"]
        frozen = [f"strategy.warmup_rounds={self.after}", f"strategy.freeze_scope={self.scope}"]
        fork = [f"from={self.checkpoint(work)}"] if self.forks else []
        words = [f"experiment={self.experiment}", *PLAIN, *local, "client.lr_final=0.01", *length, *frozen]
        return [*words, *fork, *more]


def every(rounds: int) -> int:
    return max(1, rounds // EVALUATIONS)


@cache
def all_cells(seeds: int = len(SEEDS), rounds: int = ROUNDS) -> tuple[Cell, ...]:
    """The most informative first. A trial with other rounds has other seeds than the study."""
    numbers = SEEDS[:seeds] if rounds == ROUNDS else range(1, seeds + 1)
    found = []
    for experiment in EXPERIMENTS:
        for schedule in SCHEDULES:
            for rate in RATES:
                arms = [(freeze, "qk") for freeze in (NEVER, *FREEZES)]
                if (experiment, schedule, rate) == (FEW, "constant", "1"):
                    arms += [(freeze, scope) for scope in CONTROLS for freeze in CONTROLLED]
                found += [
                    Cell(experiment, schedule, rate, *arm, seed, rounds) for arm in arms for seed in numbers
                ]
    return tuple(sorted(found, key=lambda cell: cell.priority))


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("experiment", "schedule", "rate", "freeze", "scope", "seed"))


# The server average --------------------------------------------------------------------------------------


def evaluate_average(laboratory: Laboratory) -> None:
    """From now on, in this process, each evaluation of a global model is followed by one of its exponential
    moving average: `average_test_accuracy` and `average_val_accuracy` of a row. Training does not see it."""
    import torch

    from fedfrozen_app.exchange.arrays import to_tensors
    from fedfrozen_app.files.disk import save_tensors
    from fedfrozen_app.local.model_evaluation import evaluate_test, evaluate_validation
    from fedfrozen_app.run import evaluation
    from fedfrozen_app.server.hooks import Checkpoints

    plain = evaluation.evaluator
    if getattr(plain, "with_average", False):
        return

    def evaluator(strategy: Any, worker: Any) -> Any:
        from safetensors.torch import load_file

        evaluate_model = plain(strategy, worker)
        folder = next(hook.folder.parent for hook in strategy.hooks if isinstance(hook, Checkpoints))
        start, average = 0, {}
        if worker.config.start_from:
            checkpoint = Path(worker.config.start_from)
            start = int(checkpoint.name)
            average = load_file(checkpoint.parents[1] / f"average-{start}.safetensors")

        def evaluate(server_round: int, arrays: Any) -> Any:
            record, model = evaluate_model(server_round, arrays), to_tensors(arrays)
            if server_round <= start:
                return record
            for name, value in model.items():
                if name in average:
                    average[name] = average[name].to(value).lerp(value, 1 - DECAY)
                else:
                    average[name] = value.clone()
            if server_round in laboratory.wanted:
                save_tensors(average, folder / f"average-{server_round}.safetensors")
            if record is not None:
                if worker.device.type == "cuda":
                    torch.cuda.synchronize()  # no step may still read the parameters that are replaced here
                try:
                    worker.load(average, {})
                    with worker.only_global():
                        found = {"test": evaluate_test(worker), "val": evaluate_validation(worker)}
                finally:
                    worker.load(model, strategy.digests)
                record.update(
                    {f"average_{rows}_accuracy": own["accuracy"] for rows, own in found.items() if own}
                )
            return record

        return evaluate

    evaluator.with_average = True  # type: ignore[attr-defined]
    evaluation.evaluator = evaluator


# Training ------------------------------------------------------------------------------------------------


def measure(cells: Sequence[Cell], laboratory: Laboratory, work: Path, more: Sequence[str]) -> list[Row]:
    """Train the cells of one group, and return their rows."""
    began = time.perf_counter()
    evaluate_average(laboratory)
    runs = [(cell.words(work, more), cell.folder(work)) for cell in cells]
    wanted = cells[0].checkpoints
    outcomes = laboratory.train(runs, cells[0].experiment, wanted)
    rows = [row_of(cell, outcome) for cell, outcome in zip(cells, outcomes, strict=True)]
    if not wanted:
        for _, folder in runs:
            shutil.rmtree(folder, ignore_errors=True)
    share = (time.perf_counter() - began) / len(cells)
    cost = {"seconds": round(share, 2), "stack": len(cells), "device": device_name(laboratory)}
    return [row | cost for row in rows]


def device_name(laboratory: Laboratory) -> str:
    import torch

    pool = next(reversed(laboratory.kept.values()))
    on_gpu = any(worker.device.type == "cuda" for worker in pool.workers)
    return torch.cuda.get_device_name() if on_gpu else "cpu"


def row_of(cell: Cell, outcome: tuple[list[Row], Row] | BaseException) -> Row:
    row: Row = {
        "experiment": cell.experiment,
        "schedule": cell.schedule,
        "rate": cell.rate,
        "freeze": cell.freeze,
        "scope": cell.scope,
        "seed": cell.seed,
        "lr": RATES[cell.rate],
        "rounds": cell.rounds,
        "after": cell.after,
        "every": every(cell.rounds),
    }
    if isinstance(outcome, BaseException):
        if not is_result(outcome):
            raise outcome
        return row | {"failed": str(outcome)}
    rows, _ = outcome
    for name, key in CURVES.items():
        row[name] = [round(value, 4) for value in curve(rows, key)]
    row["megabytes"] = round(sum(r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in rows) / 1e6, 1)
    return row | {"score": mean_of_last(row["test"])}


CURVES = {
    "test": "test_accuracy",
    "val": "val_accuracy",
    "average_test": "average_test_accuracy",
    "average_val": "average_val_accuracy",
}


class Schedule:
    """Which group trains next, and whether there is time for it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.until, self.path = options, options.until, options.rows / NAME
        self.done = {key_of(row) for row in read(self.path)}
        self.made: set[Cell] = set()  # runs of this call that never freeze
        self.again: set[Cell] = set()  # of them, those that had a row already
        self.given_up: set[Cell] = set()
        self.pace = Pace()

    def next(self, busy: set[Cell]) -> tuple[Cell, ...]:
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.ready(busy):
            groups.setdefault(cell.group, []).append(cell)
        found = (tuple(cells[: self.options.stack]) for cells in groups.values())
        return next((cells for cells in found if self.fits(cells)), ())

    def ready(self, busy: set[Cell]) -> Iterator[Cell]:
        seen: set[Cell] = set()
        for cell in all_cells(self.options.seeds or len(SEEDS), self.options.rounds):
            if cell.key in self.done or cell in busy:
                continue
            ended = cell.whole.key in self.done and cell.whole not in busy
            if cell.forks and not (ended and cell.checkpoint(self.options.work).exists()):
                cell = cell.whole  # first, or again for its checkpoints
                if cell in self.made:  # and yet they are missing
                    continue
            if cell not in busy and cell not in seen and cell not in self.given_up:
                seen.add(cell)
                yield cell

    def fits(self, cells: Sequence[Cell]) -> bool:
        expected = self.pace.expected(self.kind(cells[0]), cells[0].steps, len(cells))
        return time.time() + expected < self.until

    def kind(self, cell: Cell) -> tuple[Any, ...]:
        return (cell.experiment, cell.scope == "random")

    def take(self, cells: Sequence[Cell], rows: Sequence[Row] | str) -> None:
        if isinstance(rows, str):
            self.given_up.update(cells)
            print(rows, file=sys.stderr, flush=True)
            return
        self.pace.note(self.kind(cells[0]), cells[0].steps, rows)
        for cell, row in zip(cells, rows, strict=True):
            if not cell.forks:
                self.made.add(cell)
            if cell.key in self.done:
                self.again.add(cell)
                continue
            self.done.add(cell.key)
            more = {"commit": self.options.commit}
            if cell.whole in self.again:
                more["prefix"] = "trained again"
            append(self.path, row | more)


# What came out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """The runs of a cell, over seeds; `average`: the server average of these runs is scored."""

    experiment: str
    schedule: str
    rate: str
    freeze: str = NEVER
    scope: str = "qk"
    average: bool = False

    @property
    def title(self) -> str:
        return f"{self.schedule}, {self.rate}"


class Rows:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if "failed" not in row]
        self.failed = [row for row in rows if "failed" in row]
        self.arms: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            self.arms.setdefault(key_of(row)[:-1], []).append(row)

    def scores(self, arm: Arm, rows: str = "test", last: int = LAST) -> dict[int, float]:
        """In percent, by seed: the mean of the last evaluations."""
        key = f"average_{rows}" if arm.average else rows
        own = (arm.experiment, arm.schedule, arm.rate, arm.freeze, arm.scope)
        return {row["seed"]: 100 * mean_of_last(row[key][-last:]) for row in self.arms.get(own, ())}

    def difference(self, one: Arm, other: Arm, last: int = LAST) -> Difference | None:
        found = paired(self.scores(one, last=last), self.scores(other, last=last))
        return found if found is not None and found.seeds >= TESTED else None

    def tuned(self, experiment: str, freeze: str) -> tuple[Arm | None, int]:
        """The schedule and rate that are best on validation rows, and among how many."""
        arms = [Arm(experiment, schedule, rate, freeze) for schedule in SCHEDULES for rate in RATES]
        values = {arm: self.scores(arm, "val") for arm in arms}
        means = {arm: statistics.fmean(own.values()) for arm, own in values.items() if len(own) >= TESTED}
        return max(means, key=lambda arm: means[arm], default=None), len(means)

    def mean(self, arm: Arm) -> str:
        scores = self.scores(arm)
        return f"{statistics.fmean(scores.values()):.1f}" if scores else "not run"


def holm(values: Sequence[float]) -> list[float]:
    """Holm 1979: the k-th smallest p of m counts m - k + 1 times, and is no less than the one before."""
    found, least = [0.0] * len(values), 0.0
    for place, number in enumerate(sorted(range(len(values)), key=lambda n: values[n])):
        least = max(least, min(1.0, values[number] * (len(values) - place)))
        found[number] = least
    return found


def verdict(difference: Difference, p: float) -> str:
    if p < 0.05:
        return "gain" if difference.mean > 0 else "loss"
    within = abs(difference.mean) + difference.half <= TIE
    return "tie" if within else "not distinguished"


def judged(differences: Sequence[Difference | None]) -> list[list[str]]:
    """Difference, corrected p and verdict of each member of a family."""
    tested = [difference for difference in differences if difference is not None]
    corrected = iter(holm([difference.p for difference in tested]))
    found = []
    for difference in differences:
        if difference is None:
            found.append(["not run", "", ""])
            continue
        p = next(corrected)
        seeds = "" if difference.seeds == len(SEEDS) else f" ({difference.seeds} seeds)"
        found.append([f"{difference}{seeds}", f"{p:.2g}", verdict(difference, p)])
    return found


RESULT = ["points, paired", "p (Holm)", "verdict"]


def primary(rows: Rows) -> list[str]:
    base = Arm(FEW, "constant", "1")
    lines = [["`digits_few`, constant, 1: 50 % against never (replication)", rows.mean(base)]]
    lines[0] += judged([rows.difference(replace(base, freeze="50 %"), base)])[0]
    named: list[list[str]] = []
    differences: list[Difference | None] = []
    for experiment in EXPERIMENTS:
        never, of_never = rows.tuned(experiment, NEVER)
        for freeze in SHOWN:
            own, of = rows.tuned(experiment, freeze)
            title = f"`{experiment}`, tuned: {freeze}"
            if own is None or never is None:
                named.append([title, "not run"])
                differences.append(None)
                continue
            few = "" if of == of_never == 6 else f"; of {of} and {of_never} settings"
            named.append([f"{title} ({own.title}) against never ({never.title}{few})", rows.mean(never)])
            differences.append(rows.difference(own, never))
    lines += [[*name, *result] for name, result in zip(named, judged(differences), strict=True)]
    head = ["comparison (schedule, rate)", "never, %", *RESULT]
    return [f"Study A, scores over the last {LAST} evaluations:", table(head, lines)]


def controls(rows: Rows) -> list[str]:
    base = Arm(FEW, "constant", "1")
    pairs = [(scope, freeze) for scope in CONTROLS for freeze in reversed(CONTROLLED)]
    kernel = [replace(base, freeze=freeze) for _, freeze in pairs]
    others = [replace(base, freeze=freeze, scope=scope) for scope, freeze in pairs]
    results = judged([rows.difference(one, other) for one, other in zip(kernel, others, strict=True)])
    lines = [
        [f"{freeze}: kernel against {CONTROLS[scope]}", rows.mean(other), *result]
        for (scope, freeze), other, result in zip(pairs, others, results, strict=True)
    ]
    return ["Study B:", table(["comparison", "other, %", *RESULT], lines)]


def rule(rows: Rows) -> list[str]:
    named, differences = [], []
    for experiment, freeze in ((FEW, "20 %"), (DRIFT, "75 %")):
        for other in (NEVER, "50 %"):
            base = Arm(experiment, "constant", "1")
            named.append(f"`{experiment}`: {freeze} against {other}")
            differences.append(rows.difference(replace(base, freeze=freeze), replace(base, freeze=other)))
    lines = [[name, *result] for name, result in zip(named, judged(differences), strict=True)]
    return ["The rule for `auto`, constant, rate 1:", table(["comparison", *RESULT], lines)]


def settings() -> list[Arm]:
    return [Arm(e, schedule, rate) for e in EXPERIMENTS for schedule in SCHEDULES for rate in RATES]


def every_cell(rows: Rows) -> list[str]:
    arms = [(never, replace(never, freeze=freeze)) for never in settings() for freeze in SHOWN]
    results = iter(judged([rows.difference(frozen, never) for never, frozen in arms]))
    lines = []
    for never in settings():
        shown = [next(results) for _ in SHOWN]
        cells = [" ".join(filter(None, (d, v, p and f"(p = {p})"))) for d, p, v in shown]
        lines.append([f"`{never.experiment}`, {never.title}", rows.mean(never), *cells])
    return [
        "## Every cell\n\nFreeze against never at the same schedule and rate, points; Holm over 36:",
        table(["setting", "never, %", *SHOWN], lines),
    ]


def averages(rows: Rows) -> list[str]:
    plain = settings()
    results = judged([rows.difference(replace(arm, average=True), arm) for arm in plain])
    lines = []
    for arm, result in zip(plain, results, strict=True):
        average = replace(arm, average=True)
        frozen = [rows.difference(replace(average, freeze=freeze), average) for freeze in SHOWN]
        described = ["not run" if d is None else str(d) for d in frozen]
        lines.append([f"`{arm.experiment}`, {arm.title}", rows.mean(average), *result, *described])
    head = ["setting", "average, never, %", *RESULT, *(f"{freeze} to never, averaged" for freeze in SHOWN)]
    return [
        f"## Server average\n\nThe average of the server's models (decay {DECAY}) against the model, never "
        "frozen, Holm over 12; then freeze against never, both averaged, without a verdict:",
        table(head, lines),
    ]


def described(rows: Rows) -> list[str]:
    lines = []
    for experiment in EXPERIMENTS:
        for rate in RATES:
            own = []
            for freeze in (NEVER, *SHOWN):
                constant, cosine = (Arm(experiment, schedule, rate, freeze) for schedule in SCHEDULES)
                own.append(rows.difference(cosine, constant))
            lines.append([f"`{experiment}`, {rate}", *("not run" if d is None else str(d) for d in own)])
    parts = ["## Cosine against constant\n\nPoints at the same freeze and rate, without a verdict:"]
    parts.append(table(["setting", NEVER, *SHOWN], lines))
    base, lines = Arm(FEW, "constant", "1"), []
    for scope, name in CONTROLS.items():
        own = [rows.difference(replace(base, freeze=f, scope=scope), base) for f in reversed(CONTROLLED)]
        lines.append([name, *("not run" if d is None else str(d) for d in own)])
    parts.append("## Other parts against never\n\n`digits_few`, constant, 1, without a verdict:")
    parts.append(table(["frozen part", *reversed(CONTROLLED)], lines))
    lines = []
    for never in settings():
        own = [rows.difference(replace(never, freeze=freeze), never, last=1) for freeze in SHOWN]
        lines.append(
            [f"`{never.experiment}`, {never.title}", *("not run" if d is None else str(d) for d in own)]
        )
    parts.append("## The last evaluation alone\n\nFreeze against never, without a verdict:")
    parts.append(table(["setting", *SHOWN], lines))
    return parts


def account(rows: Rows) -> str:
    """What was run, what is missing, what failed."""
    everything = rows.rows + rows.failed
    done = {key_of(row) for row in everything}
    missing = [cell for cell in all_cells() if cell.key not in done]
    spent = sum(row["seconds"] for row in everything) / 60
    commits = ", ".join(sorted({str(row["commit"])[:7] for row in everything}))
    devices = ", ".join(sorted({row["device"] for row in everything}))
    text = (
        f"{len(done)} of {len(all_cells())} runs, {spent:.0f} process-minutes on {devices}, commit {commits}."
    )
    if missing:
        groups = dict.fromkeys(cell.title.rpartition(" seed ")[0] for cell in missing)
        text += f" Not run or incomplete: {'; '.join(groups)}."
    if rows.failed:
        text += " Failed: " + "; ".join(f"{key_of(row)}" for row in rows.failed) + "."
    if again := sum("prefix" in row for row in rows.rows):
        text += f" {again} forks start from a run that was trained again for its checkpoints."
    return text


def report(rows: Rows) -> str:
    return "\n\n".join([*primary(rows), *controls(rows), *rule(rows), account(rows)])


def appendix(rows: Rows) -> str:
    """The secondary analyses."""
    return "\n\n".join([*every_cell(rows), *averages(rows), *described(rows)])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="train what is missing")
    training_arguments(command, work="outputs/freezing")
    command.add_argument("--rounds", type=int, default=ROUNDS, help="fewer to try the script")
    command.add_argument("--commit", default=os.environ.get("FEDFROZEN_COMMIT"), help="without a checkout")
    command = commands.add_parser(
        "report", help="tables of what is there; the pages are written by recompute.py"
    )
    command = commands.add_parser("merge", help="add rows of other folders")
    command.add_argument("others", type=Path, nargs="+")
    for command in commands.choices.values():
        command.add_argument("--rows", type=Path, default=RESULTS, help=f"the folder of {NAME}")
    options = parser.parse_args(words)
    if options.command == "merge":
        merge(options.rows, options.others, lambda a, b: key_of(a) == key_of(b))
    elif options.command == "report":
        rows = Rows(read(options.rows / NAME))
        if not rows.rows:
            parser.error(f"{options.rows / NAME} has no row")
        print(report(rows), appendix(rows), sep="\n\n")
    else:
        options = completed(options)
        fill(Schedule(options), measure, [f"experiment={DRIFT}"], options)


if __name__ == "__main__":
    main()
