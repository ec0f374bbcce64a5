"""Figures that others publish, and ours at their settings: one command each.

    python benchmarks/public_numbers.py run --data DIR --device cuda --workers 3 --minutes 60
    python benchmarks/public_numbers.py report
    python benchmarks/public_numbers.py run --exact --data DIR --jpeg DIR --device cuda --workers 3
    python benchmarks/public_numbers.py run --tiny             (a minute on a CPU: to see it work)

`--data` is a folder with CIFAR-10's train.parquet and test.parquet. Every line of the table is a command of
`fedfrozen`, whose settings are those that were published: nothing is tuned here, and no test row chooses
anything. What counts is the test accuracy after the last round; the mean of the last five rounds and the best
round stand beside it, because some of the published figures are a best round.

A cell is one line from one seed, and one line of `results/public.jsonl` once it is finished. Started again,
the script goes on with what is missing: the first seed of every line before the second of any. `--lines`
names some, also those that are not run by default because of what they cost.

`--exact` is the study of docs/results/appendix/public-exact.md: NIID-Bench's own partitions on exact pixels,
`--data` being lossless and `--jpeg` the same rows after JPEG. Runs train in stacks where their training is
the same. What was not over when the time was up is kept as unfinished, beside the rows.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cells import (
    LAST,
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
    paired,
    read,
    table,
    training_arguments,
)

ROWS = Path(__file__).parent / "results" / "public.jsonl"
SEEDS, STACK = 3, 4
NVFLARE, NIID, MOON = "NVFLARE `cifar10-sim`", "Flower `niid_bench`, NIID-Bench", "Flower `moon`"
FED_HET = "fed_het"


@dataclass(frozen=True)
class Line:
    """One published setting, by the words behind `fedfrozen`."""

    name: str
    source: str
    setting: str
    published: tuple[float, ...]  # percent; several where several have published it
    words: tuple[str, ...]
    images: float  # that a run trains on, in millions
    not_run: str = ""  # why it is left out unless it is named
    needs: str = ""  # what a machine must have for it, which this script does not bring
    split: str = ""  # NIID-Bench's name of its own partition, where that is used
    jpeg: bool = False  # trains on the pixels after JPEG
    spread: float = 0.0  # of the first published figure, as printed with it
    stack: str = ""  # runs of one word have the same local training

    @property
    def command(self) -> str:
        return " ".join(["fedfrozen", *self.words, "dataset.path=DIR"])


def nvflare(name: str, setting: str, published: float, *words: str, **more: Any) -> Line:
    return Line(name, NVFLARE, setting, (published,), ("experiment=nvflare_cifar10", *words), 10, **more)


def niid(name: str, setting: str, flower: float, own: float, *words: str) -> Line:
    return Line(name, NIID, setting, (flower, own), ("experiment=niid_bench", *words), 25)


TWICE = "twice the rounds of the lines above, for a setting that they nearly are"
LINES = {
    line.name: line
    for line in (
        nvflare("nvflare-0.1", "FedAvg, α 0.1", 80.5),
        niid("niid-fedavg", "FedAvg", 62.5, 68.2),
        nvflare("nvflare-scaffold", "SCAFFOLD, α 0.1", 82.6, "strategy=scaffold"),
        niid("niid-scaffold", "SCAFFOLD", 68.1, 69.8, "strategy=scaffold", "client.weight_decay=0"),
        nvflare("nvflare-1", "FedAvg, α 1", 89.1, "partition.alpha=1"),
        niid("niid-fedprox", "FedProx, μ 0.01", 65.6, 67.9, "strategy=fedprox", "strategy.mu=0.01"),
        nvflare("nvflare-0.5", "FedAvg, α 0.5", 87.9, "partition.alpha=0.5"),
        niid("niid-fednova", "FedNova", 63.9, 66.8, "strategy=fednova"),
        nvflare("nvflare-0.3", "FedAvg, α 0.3", 85.3, "partition.alpha=0.3"),
        nvflare("nvflare-fedprox", "FedProx, μ 1e-5, α 0.1", 80.6, "strategy=fedprox", "strategy.mu=1e-5"),
        nvflare(
            "nvflare-fedopt",
            "FedOpt, α 0.1",
            80.6,
            *("server_optimizer=avgm", "server_optimizer.beta=0.6", "server_optimizer.lr=1"),
            not_run="its server's rate falls from 1.0 to 0.9 along a cosine, and ours is constant",
        ),
        Line(
            "moon",
            MOON,
            "MOON, μ 5",
            (70.7,),
            ("experiment=niid_bench", "strategy=moon", "strategy.mu=5", "num_rounds=100"),
            50,
            TWICE,
        ),
        Line(
            "moon-fedprox",
            MOON,
            "FedProx, μ 0.001",
            (68.5,),
            ("experiment=niid_bench", "strategy=fedprox", "strategy.mu=0.001", "num_rounds=100"),
            50,
            TWICE,
        ),
        Line(
            "vit",
            FED_HET,
            "FedAvg, ViT-S at 224 pixels, 2 classes a client",
            (96.8,),
            (
                *("experiment=cifar10", "strategy=fedavg", "model=checkpoint", "model.path=DIR/vit-s"),
                *("dataset.image_size=224", "dataset.validation=0", "dataset.client_validation=0"),
                *("num_clients=5", "partition=labels", "partition.labels=2", "client=sgd", "client.lr=0.03"),
                *("client.momentum=0", "client.clip=1", "client.batch_size=32"),
                "client.lr_schedule=constant",
            ),
            5,
            "some hundred times the arithmetic of a line above, and a pretrained ViT-S of one's own",
            needs="a pretrained ViT-S: run the command by hand",
        ),
    )
}
EXACT_SOURCE = "NIID-Bench's partitions, exact pixels"
SKEW, IID, LOOP = "noniid-labeldir", "homo", "loop"


def exact(name: str, setting: str, published: tuple[float, ...], *words: str, **more: Any) -> Line:
    """`published`: Flower's best round, with its `spread`, and NIID-Bench's figure where we have one."""
    more = {"split": SKEW, "stack": name} | more
    return Line(name, EXACT_SOURCE, setting, published, ("experiment=niid_bench", *words), 25, **more)


SCAFFOLD = ("strategy=scaffold", "client.weight_decay=0")
FEDPROX = ("strategy=fedprox", "strategy.mu=0.01")
# In the order in which they are run.
EXACT = {
    line.name: line
    for line in (
        exact("exact-fedavg", "FedAvg", (62.47, 68.2), spread=0.43, stack="fedavg"),
        exact("exact-loop", "FedAvg, the plain loop", (62.47, 68.2), spread=0.43, stack=LOOP),
        exact("exact-scaffold", "SCAFFOLD", (68.08, 69.8), *SCAFFOLD, spread=0.96),
        exact("exact-fedprox", "FedProx, μ 0.01", (65.63, 67.9), *FEDPROX, spread=0.08),
        exact("exact-fednova", "FedNova", (63.89, 66.8), "strategy=fednova", spread=1.40),
        exact("exact-iid", "FedAvg, IID", (71.32,), spread=0.33, split=IID, stack="fedavg"),
        exact("jpeg-fedavg", "FedAvg, after JPEG", (62.47, 68.2), spread=0.43, jpeg=True),
    )
}
ONE_SEED = ("jpeg-fedavg",)
LAST_OF_ALL = (LOOP,)  # of the second and third seed, the loop's come last
EVERY = LINES | EXACT
# For the machine's sake; no result depends on them. Compiling gains small convolutions nothing.
PLAIN = ("track.tensorboard=false", "checkpoint.every=0", "runtime.threads=1", "runtime.compile=false")
TINY = (
    *("dataset=digits", "dataset.channels=3", "dataset.image_size=16", "dataset.limit=40", "num_rounds=2"),
    *("num_clients=2", "client.local_epochs=1", "client.batch_size=8", "partition.min_size=4"),
)


# Cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run. An exact line has folders of its own for data and partitions."""

    line: str
    seed: int
    tiny: bool = False
    data: str = ""
    partitions: str = ""

    @property
    def title(self) -> str:
        return f"{self.line}, seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{self.line}-{self.seed}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Cells of one kind can be stacked. Other lines differ in precision, which is the process's."""
        line = EVERY[self.line]
        return (line.stack, self.data) if line.stack else (self.line, self.seed)

    def words(self, more: Sequence[str]) -> Words:
        line, small = EVERY[self.line], TINY if self.tiny else ()
        own = [f"seed={self.seed}", *more]
        if line.split:
            path = Path(self.partitions) / f"{line.split}-{self.seed}.json"
            own += ["partition=file", f"partition.path={path}", f"dataset.path={self.data}"]
        return [*PLAIN, *line.words, *small, *own]


def cells_of(names: Sequence[str], rows: Sequence[Row], seeds: int, *, tiny: bool = False) -> list[Cell]:
    """What is missing: the first seed of every line before the second of any."""
    done = {(row["line"], row["seed"]) for row in rows}
    cells = [Cell(name, seed, tiny) for seed in range(seeds) for name in names]
    cells = [cell for cell in cells if not (cell.seed and cell.line in ONE_SEED)]
    cells.sort(key=lambda cell: bool(cell.seed) and EVERY[cell.line].stack in LAST_OF_ALL)
    return [cell for cell in cells if (cell.line, cell.seed) not in done]


def measure(cells: Sequence[Cell], laboratory: Laboratory, work: Path, more: Sequence[str]) -> list[Row]:
    """Train cells of one kind in one stack: one cell for lines whose network has dropout."""
    began, first = time.perf_counter(), cells[0]
    runs = [(cell.words(more), work / cell.name) for cell in cells]
    if EVERY[first.line].stack == LOOP:
        curves: list[Any] = [loop_curve(cell, *run) for cell, run in zip(cells, runs, strict=True)]
    else:
        corpus = as_read_by(runs[0][0], corpus_of(first, laboratory, runs[0][0]))
        curves = laboratory.train(runs, first.kind, set(), on=corpus)
    seconds = round((time.perf_counter() - began) / len(cells), 1)
    rows = []
    for cell, outcome, (_, folder) in zip(cells, curves, runs, strict=True):
        row: Row = {"line": cell.line, "seed": cell.seed}
        if isinstance(outcome, BaseException):
            if not is_result(outcome):
                raise outcome
            row |= {"failed": str(outcome)}
        else:
            metrics, told = outcome
            row |= scored(metrics) | told
            row |= {"clients_failed": sum(each.get("clients_failed", 0) for each in metrics)}
            if cell.partitions:
                row |= named(cell)
        shutil.rmtree(folder, ignore_errors=True)
        rows.append(row | {"seconds": seconds, "stacked": len(cells)})
    return rows


def scored(metrics: Sequence[Row]) -> Row:
    values = [round(value, 4) for value in curve(metrics, "test_accuracy")]
    return {"final": values[-1], "score": mean_of_last(values), "best": max(values), "curve": values}


def named(cell: Cell) -> Row:
    """What an exact cell trained on."""
    beta = " 0.5" if EVERY[cell.line].split == SKEW else ""
    return {"partition": f"NIID-Bench {EVERY[cell.line].split}{beta}, seed {cell.seed}"}


def loop_curve(cell: Cell, words: Words, folder: Path) -> tuple[list[Row], Row]:
    """The plain loop's accuracies; every round's is written to the folder, as a run's are."""
    import torch
    from niid_loop import federate

    from fedfrozen_app.config import compose_config, device_of, read, resolved

    config = read(resolved(compose_config(words)))  # the numbers of rounds and epochs alone
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # as the runs beside it
    passes = {"rounds": config.num_rounds, "epochs": config.client.local_epochs}
    rows = []
    for number, value in enumerate(
        federate(Path(cell.data), cell.seed, device_of(config.device), **passes), start=1
    ):
        rows.append({"round": number, "test_accuracy": value})
        append(folder / "metrics.jsonl", rows[-1])
    return rows, {}


CORPORA: dict[Any, Any] = {}  # that this worker has read beside everybody's


def corpus_of(cell: Cell, laboratory: Laboratory, words: Words) -> Any:
    if not EVERY[cell.line].jpeg:
        return laboratory.corpus
    if cell.data not in CORPORA:
        CORPORA[cell.data] = load_data(words)
    return CORPORA[cell.data]


def write_partitions(folder: Path, data: Path, seeds: int) -> None:
    """NIID-Bench's partitions, for `partition=file`."""
    import pyarrow.parquet as parquet
    from niid_partition import homogeneous, label_skew

    labels = parquet.read_table(data / "train.parquet", columns=["label"])["label"].to_numpy()
    folder.mkdir(parents=True, exist_ok=True)
    for name, deal in ((SKEW, label_skew), (IID, homogeneous)):
        for seed in range(seeds):
            clients = {str(number): rows for number, rows in enumerate(deal(labels, seed))}
            (folder / f"{name}-{seed}.json").write_text(json.dumps(clients))


def pixels_of(data: Path | None) -> str:
    """Whether a folder's pictures went through JPEG."""
    import pyarrow.parquet as parquet

    if data is None:
        return "digits"
    rows = next(parquet.ParquetFile(data / "train.parquet").iter_batches(1, columns=["image"]))
    return "JPEG" if rows.to_pylist()[0]["image"]["bytes"].startswith(b"\xff\xd8") else "exact"


def keep_unfinished(work: Path, rows: Path, more: Row) -> None:
    """Curves of runs that were not over, from the folders that they left."""
    from fedfrozen_app.files.rows import read_rows

    for folder in sorted(work.glob("*-[0-9]")):
        if not (folder / "metrics.jsonl").exists():
            continue
        values = [round(value, 4) for value in curve(read_rows(folder), "test_accuracy")]
        line, _, seed = folder.name.rpartition("-")
        if values:
            pixels = "JPEG" if EVERY[line].jpeg else "exact"
            row = {"line": line, "seed": int(seed), "unfinished": len(values), "curve": values}
            row |= {"pixels": pixels} | named(Cell(line, int(seed)))
            append(unfinished_rows(rows), row | more)
            print(f"unfinished: {folder.name}, {len(values)} rounds, {values[-1]:.4f}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def as_read_by(words: Words, corpus: Any) -> Any:
    """The same rows, normalised as this line says: the sources differ in nothing else of their data."""
    from fedfrozen_app.config import compose_config, read, resolved

    dataset = read(resolved(compose_config(words))).dataset
    mean, std = tuple(dataset.mean or ()), tuple(dataset.std or ())
    key = (id(corpus), mean, std)
    if key not in CORPORA:  # one object for all runs: they share what is dealt and what is on the device
        CORPORA[key] = replace(corpus, mean=mean, std=std)
    return CORPORA[key]


class Schedule:
    """What is trained next, and whether there is still time for it."""

    def __init__(self, names: Sequence[str], options: argparse.Namespace) -> None:
        self.names, self.options, self.until = names, options, options.until
        self.rows = read(options.rows)
        self.given_up: set[Cell] = set()
        self.pace = Pace()

    def next(self, busy: set[Cell]) -> tuple[Cell, ...]:
        seeds = self.options.seeds or (1 if self.options.tiny else SEEDS)
        missing = cells_of(self.names, self.rows, seeds, tiny=self.options.tiny)
        if self.options.exact:
            missing = [self.placed(cell) for cell in missing]
        free = [cell for cell in missing if cell not in busy and cell not in self.given_up]
        for cell in free:
            group = [other for other in free if other.kind == cell.kind]
            if not self.options.together:  # the first seed is over before the stack of the others begins
                group = [other for other in group if bool(other.seed) == bool(cell.seed)]
            most = 1 if EVERY[cell.line].stack in ("", LOOP) else STACK
            for size in range(min(most, len(group)), 0, -1):
                if self.fits(group[:size]):
                    return tuple(group[:size])
        return ()

    def placed(self, cell: Cell) -> Cell:
        folder = self.options.jpeg if EVERY[cell.line].jpeg else self.options.data
        partitions = self.options.work / "partitions"
        return replace(cell, data=str(folder.resolve()), partitions=str(partitions))

    def fits(self, cells: Sequence[Cell]) -> bool:
        return time.time() + self.pace.expected(*pace_of(cells[0]), len(cells)) < self.until

    def take(self, cells: Sequence[Cell], rows: Sequence[Row] | str) -> None:
        if isinstance(rows, str):
            self.given_up.update(cells)
            print(rows, file=sys.stderr, flush=True)
            return
        self.pace.note(*pace_of(cells[0]), rows)
        for cell, row in zip(cells, rows, strict=True):
            pixels = "JPEG" if EVERY[cell.line].jpeg else self.options.pixels
            row |= {"pixels": pixels, "commit": self.options.commit}
            self.rows.append(row)
            append(self.options.rows, row)


def pace_of(cell: Cell) -> tuple[str, int]:
    """What is alike in time, and how much of it there is."""
    line = EVERY[cell.line]
    return line.stack or line.source, int(line.images)


# What came out -------------------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> str:
    parts = []
    for source in dict.fromkeys(line.source for line in LINES.values()):
        own = [line for line in LINES.values() if line.source == source]
        head = ["setting", "published", "ours, last round", "seeds", "apart", f"last {LAST}", "best round"]
        parts += [f"**{source}**", table(head, [line_of_table(line, rows) for line in own])]
        parts.append("\n".join(["```", *(line.command for line in own), "```"]))
    skipped = [f"*{line.setting}* ({line.source}): {line.not_run}" for line in left_out(rows)]
    if skipped:
        parts.append("Not run: " + "; ".join(skipped) + ".")
    failed = [f"{row['line']}, seed {row['seed']} ({row['failed']})" for row in rows if "failed" in row]
    if failed:
        parts.append("Failed: " + "; ".join(failed) + ".")
    spent = sum(row["seconds"] for row in rows)
    parts.append(f"{len(rows)} runs, {spent / 60:.0f} minutes of workers' time.")
    return "\n\n".join(parts) + "\n"


def exact_report(rows: Sequence[Row], unfinished: Sequence[Row]) -> str:
    """The tables of docs/results/appendix/public-exact.md, whose rules were written before the runs."""
    head = ["setting", "seeds", "best round", "Flower, best round", "verdict", "last round", "NIID-Bench"]
    head.append(f"last {LAST}")
    parts = [table(head, [exact_line(line, rows) for line in EXACT.values()])]
    scores = {
        name: {row["seed"]: 100 * row["score"] for row in rows if row["line"] == name and "score" in row}
        for name in EXACT
    }
    code = paired(scores["exact-fedavg"], scores["exact-loop"])
    if code is not None:
        size = abs(code.mean)
        verdict = "they agree" if size <= 1 else "our code differs" if size > 2 else "undecided"
        what = f"FedAvg minus the plain loop, last {LAST} rounds, seeds: {code.seeds}"
        parts.append(f"{what}: {code}: {verdict}.")
    twin = paired(scores["jpeg-fedavg"], scores["exact-fedavg"])
    if twin is not None:
        parts.append(f"After JPEG minus exact pixels, FedAvg, seed 0, last {LAST} rounds: {twin}.")
    over = {(row["line"], row["seed"]) for row in rows}
    open_rows = [row for row in unfinished if (row["line"], row["seed"]) not in over]
    left = [f"{row['line']}, seed {row['seed']} ({row['unfinished']} rounds)" for row in open_rows]
    if left:
        parts.append("Not finished in time, and not in the table: " + "; ".join(left) + ".")
    failed = [f"{row['line']}, seed {row['seed']} ({row['failed']})" for row in rows if "failed" in row]
    if failed:
        parts.append("Failed: " + "; ".join(failed) + ".")
    own = [row for row in rows if row["line"] in EXACT]
    if own:
        commits = ", ".join(sorted({str(row["commit"])[:7] for row in own}))
        parts.append(f"{len(own)} runs of {len(cells_of(list(EXACT), [], SEEDS))}, commit {commits}.")
    return "\n\n".join(parts) + "\n"


def exact_line(line: Line, rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["line"] == line.name and "failed" not in row]
    flower, *other = line.published
    said = (f"{flower:.1f} ± {line.spread:.1f}", f"{other[0]:.1f}" if other else "")
    if not own:
        return [line.setting, "0", "", said[0], "not run", "", said[1], ""]
    best, final, last = ([100 * row[key] for row in own] for key in ("best", "final", "score"))
    verdict = "" if len(own) < SEEDS else compared(best, flower, line.spread)
    shown = (f"{statistics.fmean(values):.1f}{spread_of(values)}" for values in (best, final, last))
    first, second, third = shown
    return [line.setting, str(len(own)), first, said[0], verdict, second, said[1], third]


def spread_of(values: Sequence[float]) -> str:
    return f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""


def compared(values: Sequence[float], published: float, spread: float) -> str:
    """Two standard deviations of the difference, ours and theirs together."""
    away = statistics.fmean(values) - published
    reproduced = abs(away) <= 2 * math.hypot(statistics.stdev(values), spread)
    return f"{away:+.1f}, {'within' if reproduced else 'beyond'} the spread"


def left_out(rows: Sequence[Row]) -> list[Line]:
    there = {row["line"] for row in rows}
    return [line for line in LINES.values() if line.not_run and line.name not in there]


def line_of_table(line: Line, rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["line"] == line.name and "failed" not in row]
    said = "–".join(f"{value:.1f}" for value in sorted(line.published))
    if not own:
        return [line.setting, said, "not run" if line.not_run else "not run yet", "", "", "", ""]
    final, last, best = ([100 * row[key] for row in own] for key in ("final", "score", "best"))
    apart = distance(sum(final) / len(final), line.published)
    return [
        *(line.setting, said, with_interval(final), str(len(own))),
        *(apart, with_interval(last), with_interval(best)),
    ]


def distance(ours: float, published: Sequence[float]) -> str:
    """Points from the nearest end of what is published, or that ours lies between."""
    low, high = min(published), max(published)
    if low <= ours <= high and low < high:
        return "within"
    return f"{ours - (high if ours > high else low):+.1f}"


def with_interval(values: Sequence[float]) -> str:
    """The mean, and 95 % by Student's t where there are several seeds."""
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    return str(found).removeprefix("+")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="train what is missing")
    training_arguments(command, work="outputs/public")
    command.add_argument("--lines", nargs="+", choices=EVERY, metavar="NAME", help=", ".join(EVERY))
    command.add_argument("--exact", action="store_true", help="NIID-Bench's partitions on exact pixels")
    command.add_argument("--jpeg", type=Path, help="with --exact: the folder of the same rows after JPEG")
    command.add_argument("--together", action="store_true", help="stack all seeds of a line, the first too")
    command.add_argument("--rows", type=Path, help="where the lines are kept")
    command.add_argument("--commit", default=os.environ.get("FEDFROZEN_COMMIT"), help="without a checkout")
    command.add_argument("--tiny", action="store_true", help="two rounds on digits; kept below --work")
    command = commands.add_parser("report", help="print the tables; the pages are written by recompute.py")
    command.add_argument("--rows", type=Path, default=ROWS, help="where the lines are kept")
    options = parser.parse_args(words)
    if options.command == "report":
        rows, unfinished = (read(path) for path in (options.rows, unfinished_rows(options.rows)))
        print(report([row for row in rows if row["line"] in LINES]), exact_report(rows, unfinished), sep="\n")
        return
    names = options.lines or list(EXACT if options.exact else default_lines())
    for line in (EVERY[name] for name in names if EVERY[name].needs):
        parser.error(f"{line.name} needs {line.needs}")
    if wrong := [name for name in names if (name in EXACT) != options.exact]:
        parser.error(f"lines of EXACT need --exact, and others go without it: {', '.join(wrong)}")
    if options.data is None and not options.tiny:
        parser.error("give the folder of CIFAR-10's two parquet files with --data DIR, or --tiny")
    if options.tiny and options.data is not None:
        parser.error("--tiny brings its own data: leave --data out")
    options = completed(options)
    options.pixels = pixels_of(options.data)
    if options.exact:
        if options.pixels != "exact":
            parser.error(f"{options.data} holds JPEG pictures: give lossless ones with --data")
        if options.jpeg is None:
            names = [name for name in names if not EXACT[name].jpeg]
        write_partitions(options.work / "partitions", options.data, options.seeds or SEEDS)
    options.rows = options.rows or (options.work / "tiny.jsonl" if options.tiny else ROWS)
    schedule = Schedule(names, options)
    first = Cell(names[0], 0, options.tiny)
    fill(schedule, measure, (schedule.placed(first) if options.exact else first).words([]), options)
    if options.exact:
        keep_unfinished(options.work, options.rows, {"commit": options.commit})


def default_lines() -> list[str]:
    return [line.name for line in LINES.values() if not line.not_run]


def unfinished_rows(rows: Path) -> Path:
    return rows.with_name(f"{rows.stem}-unfinished.jsonl")


if __name__ == "__main__":
    main()
