"""Figures that others publish, and ours at their settings: one command each.

    python benchmarks/public_numbers.py run --data DIR --device cuda --workers 3 --minutes 60
    python benchmarks/public_numbers.py report
    python benchmarks/public_numbers.py run --tiny             (a minute on a CPU: to see it work)

`--data` is a folder with CIFAR-10's train.parquet and test.parquet. Every line of the table is a command of
`fedfrozen`, whose settings are those that were published: nothing is tuned here, and no test row chooses
anything. What counts is the test accuracy after the last round; the mean of the last five rounds and the best
round stand beside it, because some of the published figures are a best round.

A cell is one line from one seed, and one line of `results/public.jsonl` once it is finished. Started again,
the script goes on with what is missing: the first seed of every line before the second of any. `--lines`
names some, also those that are not run by default because of what they cost.
"""

import argparse
import shutil
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
    into_page,
    is_result,
    mean_of_last,
    paired,
    read,
    table,
    training_arguments,
)

ROWS = Path(__file__).parent / "results" / "public.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "public.md"
SEEDS = 3
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
# For the machine's sake; no result depends on them. Compiling gains small convolutions nothing.
PLAIN = ("track.tensorboard=false", "checkpoint.every=0", "runtime.threads=1", "runtime.compile=false")
TINY = (
    *("dataset=digits", "dataset.channels=3", "dataset.image_size=16", "dataset.limit=40", "num_rounds=2"),
    *("num_clients=2", "client.local_epochs=1", "client.batch_size=8", "partition.min_size=4"),
)


# Cells -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run."""

    line: str
    seed: int
    tiny: bool = False

    @property
    def title(self) -> str:
        return f"{self.line}, seed {self.seed}"

    def words(self, more: Sequence[str]) -> Words:
        small = TINY if self.tiny else ()
        return [*PLAIN, *LINES[self.line].words, *small, f"seed={self.seed}", *more]


def cells_of(names: Sequence[str], rows: Sequence[Row], seeds: int, *, tiny: bool = False) -> list[Cell]:
    """What is missing: the first seed of every line before the second of any."""
    done = {(row["line"], row["seed"]) for row in rows}
    return [Cell(name, seed, tiny) for seed in range(seeds) for name in names if (name, seed) not in done]


def measure(cells: Sequence[Cell], laboratory: Laboratory, work: Path, more: Sequence[str]) -> list[Row]:
    """Train one cell at a time: a network with dropout has no room for others beside it."""
    (cell,) = cells
    began, folder = time.perf_counter(), work / f"{cell.line}-{cell.seed}"
    words = cell.words(more)
    corpus = as_read_by(words, laboratory.corpus)
    # A kind of its own: lines differ in precision, which is the process's, and in local training.
    (outcome,) = laboratory.train([(words, folder)], cell, set(), on=corpus)
    row: Row = {"line": cell.line, "seed": cell.seed}
    if isinstance(outcome, BaseException):
        if not is_result(outcome):
            raise outcome
        row |= {"failed": str(outcome)}
    else:
        rows, told = outcome
        values = [round(value, 4) for value in curve(rows, "test_accuracy")]
        row |= {"final": values[-1], "score": mean_of_last(values), "best": max(values), "curve": values}
        row |= {"clients_failed": sum(each.get("clients_failed", 0) for each in rows), **told}
    shutil.rmtree(folder, ignore_errors=True)
    return [row | {"seconds": round(time.perf_counter() - began, 1)}]


def as_read_by(words: Words, corpus: Any) -> Any:
    """The same rows, normalised as this line says: the sources differ in nothing else of their data."""
    from fedfrozen_app.config import compose_config, read, resolved

    dataset = read(resolved(compose_config(words))).dataset
    return replace(corpus, mean=tuple(dataset.mean or ()), std=tuple(dataset.std or ()))


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
        free = (cell for cell in missing if cell not in busy and cell not in self.given_up)
        return next(((cell,) for cell in free if self.fits(cell)), ())

    def fits(self, cell: Cell) -> bool:
        return time.time() + self.pace.expected(*pace_of(cell), 1) < self.until

    def take(self, cells: Sequence[Cell], rows: Sequence[Row] | str) -> None:
        if isinstance(rows, str):
            self.given_up.update(cells)
            print(rows, file=sys.stderr, flush=True)
            return
        self.pace.note(*pace_of(cells[0]), rows)
        for row in rows:
            self.rows.append(row)
            append(self.options.rows, row)


def pace_of(cell: Cell) -> tuple[str, int]:
    """What is alike in time, and how much of it there is."""
    return LINES[cell.line].source, int(LINES[cell.line].images)


# What came out ---------------------------------------------------------------------------------------------


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
    command.add_argument("--lines", nargs="+", choices=LINES, metavar="NAME", help=", ".join(LINES))
    command.add_argument("--rows", type=Path, help="where the lines are kept")
    command.add_argument("--tiny", action="store_true", help="two rounds on digits; kept below --work")
    command = commands.add_parser("report", help="put the tables into the page")
    command.add_argument("--rows", type=Path, default=ROWS, help="where the lines are kept")
    command.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(words)
    if options.command == "report":
        text = report(read(options.rows))
        print(text)
        into_page(options.page, "table", text)
        return
    names = options.lines or [line.name for line in LINES.values() if not line.not_run]
    for line in (LINES[name] for name in names if LINES[name].needs):
        parser.error(f"{line.name} needs {line.needs}")
    if options.data is None and not options.tiny:
        parser.error("give the folder of CIFAR-10's two parquet files with --data DIR, or --tiny")
    if options.tiny and options.data is not None:
        parser.error("--tiny brings its own data: leave --data out")
    options = completed(options)
    options.rows = options.rows or (options.work / "tiny.jsonl" if options.tiny else ROWS)
    fill(Schedule(names, options), measure, Cell(names[0], 0, options.tiny).words([]), options)


if __name__ == "__main__":
    main()
