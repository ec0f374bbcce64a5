"""Many runs, cell by cell: what the studies share that compare methods over settings and seeds.

A study says which cells it has, in which order, and what a cell's line holds. Here is the rest: workers that
train groups of cells of one shape beside one another, the time that is left for them, the lines on disk, and
paired differences over seeds.
"""

import argparse
import gc
import json
import logging
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from provenance import require_commit

Words = list[str]
Row = dict[str, Any]
KEPT = 2  # kinds of runs for which a worker holds on to models, data on the device and recorded steps
LAST = 5  # evaluations that make a score
BROKEN = 3  # workers that are replaced before it is clear that something is wrong for all

# Training ------------------------------------------------------------------------------------------------


class Laboratory:
    """Trains runs in this process, and keeps what the next of a kind can share.

    A run is overrides in, a folder out: the way of the command line. What is shared is the corpus, the
    partition, and (as long as the kind stays the same) the models and the recorded steps.
    """

    def __init__(self, corpus: Any) -> None:
        from fedfrozen_app.files import checkpoint
        from fedfrozen_app.report import output
        from fedfrozen_app.run import evaluation
        from fedfrozen_app.runtimes.inprocess import concurrent_runs

        self.corpus = corpus
        self.kept: dict[Any, Any] = {}  # benches by the kind of their runs
        self.wanted: set[int] = set()  # rounds whose checkpoint somebody will fork from
        # Nobody looks at hundreds of runs one by one, and pictures take longer than a fork trains.
        output.write_curves = lambda *args, **kwargs: None
        output.write_report = lambda *args: None
        evaluation.draw_labels = lambda *args: None
        write, share_out = checkpoint.write, concurrent_runs.share_out
        checkpoint.write = lambda state, *args: state.round in self.wanted and write(state, *args)
        # Dealing 50,000 rows takes seconds: forks of one seed share it.
        dealt: dict[str, Any] = {}

        def deal(corpus: Any, config: Any, count: int | None) -> Any:
            key = repr((id(corpus), config.partition, config.dataset, config.seed, count))
            if key not in dealt:
                dealt[key] = share_out(corpus, config, count)
            return dealt[key]

        concurrent_runs.share_out = deal

    def train(
        self, runs: Sequence[tuple[Words, Path]], kind: Any, wanted: set[int], on: Any = None
    ) -> list[tuple[list[Row], Row] | BaseException]:
        """For each run its rows and what is to be said of its data, or why it failed. Runs of one `kind`
        have the same model, data and local training; all of these keep the checkpoints of the `wanted`
        rounds. They train `on` another corpus than everybody's where one is given."""
        corpus = self.corpus if on is None else on
        from fedfrozen_app.config import compose_run
        from fedfrozen_app.files import checkpoint
        from fedfrozen_app.files.rows import read_rows
        from fedfrozen_app.run.job import Job
        from fedfrozen_app.runtimes.inprocess import concurrent_runs

        jobs = []
        for words, folder in runs:
            shutil.rmtree(folder, ignore_errors=True)
            composed = compose_run(words)
            config = composed.config
            start = checkpoint.read(Path(config.start_from)) if config.start_from else None
            jobs.append(Job(composed, folder, start))
        if kind not in self.kept:
            while len(self.kept) >= KEPT:
                self.kept.pop(next(iter(self.kept)))
                gc.collect()  # model, runner and step know each other: only this frees their device memory
            self.kept[kind] = concurrent_runs.WorkerPool(corpus, len(jobs))
        self.wanted = wanted
        pool = self.kept[kind]
        pool.stack.runs = len(jobs)
        found: list[tuple[list[Row], Row] | BaseException] = []
        for job, outcome in zip(jobs, concurrent_runs.run_concurrently(jobs, pool), strict=True):
            if isinstance(outcome, BaseException):
                found.append(outcome)
                continue
            labels, config = corpus.train.labels.numpy(), job.config
            parts = concurrent_runs.share_out(corpus, config, config.num_clients).partition
            told = {"classes_per_client": classes_per_client([labels[rows] for rows in parts.indices])}
            found.append((read_rows(job.folder), told | {"partition": parts.note}))
        return found


def load_data(words: Words) -> Any:
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.data.federated import load_corpus

    return load_corpus(read(resolved(compose_config(words))))


def has_gpu(device: str) -> bool:
    from fedfrozen_app.config import device_of

    return device_of(device).type == "cuda"


def is_result(error: BaseException) -> bool:
    """Whether the training itself failed, such as at a rate at which every client diverges: that is told and
    not tried again. A full disk or a wrong path is nobody's result."""
    from fedfrozen_app.core.errors import RunFailed

    return isinstance(error, RunFailed) and error.__cause__ is None


# What a run gives ----------------------------------------------------------------------------------------


def curve(rows: Sequence[Row], key: str) -> list[float]:
    """Of a trained model: round 0 says nothing."""
    return [row[key] for row in rows if key in row and row["round"]]


def mean_of_last(values: Sequence[float]) -> float:
    return round(statistics.fmean(values[-LAST:]), 5)


def scores(values: Sequence[float]) -> Row:
    """Accuracy and stability. `swing` is the standard deviation of an evaluation as its neighbours show it
    (over the second half; a trend does not count). `rise` says how far a run is from having levelled off: its
    last quarter against the one before."""
    quarter = max(1, len(values) // 4)
    late = values[len(values) // 2 :]
    found = {
        "score": statistics.fmean(values[-LAST:]),
        "final": values[-1],
        "swing": math.sqrt(statistics.fmean((a - b) ** 2 / 2 for a, b in pairwise(late))),
        "worst_drop": max(0.0, *(a - b for a, b in pairwise(late))),
        "rise": statistics.fmean(values[-quarter:])
        - statistics.fmean(values[-2 * quarter : -quarter] or values),
    }
    return {key: round(value, 5) for key, value in found.items()}


def classes_per_client(labels: Sequence[Any]) -> float:
    """How many equally frequent classes a client's labels amount to: exp of the entropy, weighed by rows."""
    total, found = sum(len(own) for own in labels), 0.0
    for own in labels:
        counts = Counter(own.tolist()).values()
        entropy = -sum(n / len(own) * math.log(n / len(own)) for n in counts)
        found += len(own) / total * math.exp(entropy)
    return round(found, 3)


# Many runs -----------------------------------------------------------------------------------------------


class Schedule(Protocol):
    """Who trains what next. A cell has a `title`."""

    until: float  # by time.time()

    def next(self, busy: set[Any]) -> tuple[Any, ...]:
        """Cells of one shape that can start and will end in time; empty: none."""

    def take(self, cells: Sequence[Any], rows: Sequence[Row] | str) -> None:
        """What came of them; a text is why the worker broke."""


# The lines of cells of one shape, given a laboratory, the folder for runs and more overrides.
Measure = Callable[[Sequence[Any], Laboratory, Path, Sequence[str]], list[Row]]


class Pace:
    """How long runs take, by kind: what is known of others is better than no idea."""

    def __init__(self) -> None:
        self._seconds: dict[Any, list[tuple[float, int]]] = {}  # a step, and how many trained at once

    def note(self, kind: Any, steps: int, rows: Sequence[Row]) -> None:
        if steps and not any("failed" in row for row in rows):
            own = self._seconds.setdefault(kind, [])
            own.append((sum(row["seconds"] for row in rows) / steps, len(rows)))

    def expected(self, kind: Any, steps: int, count: int) -> float:
        """Seconds for so many at once; 0 where nothing is known."""
        paces = self._seconds.get(kind) or [pace for others in self._seconds.values() for pace in others]
        each = [seconds * max(1.0, count / known) for seconds, known in paces[-5:]]
        return 1.15 * steps * statistics.median(each) if each else 0.0


def serve(pipe: Connection, measure: Measure, work: Path, more: Sequence[str]) -> None:
    """A worker: the corpus comes first, then one group of cells after another."""
    import torch

    import fedfrozen_app.runtimes.inprocess.concurrent_runs  # noqa: F401  (seconds, while the corpus is still being read)

    torch.set_num_threads(1)
    for name in ("flwr", "fedfrozen_app", "strategies"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.stdout = sys.stderr = (work / f"worker-{os.getpid()}.log").open("w", buffering=1)
    laboratory = Laboratory(pipe.recv())
    while True:
        try:
            pipe.send(measure(pipe.recv(), laboratory, work, more))
        except EOFError:
            return
        except Exception:  # noqa: BLE001  (whatever it was, the device may be unusable now: the parent must know)
            pipe.send(traceback.format_exc())
            return


@dataclass
class Worker:
    process: Any
    pipe: Connection
    cells: tuple[Any, ...] = ()  # that it is training

    @classmethod
    def start(cls, measure: Measure, work: Path, more: Sequence[str]) -> "Worker":
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(there, measure, work, more), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def give(self, cells: tuple[Any, ...]) -> None:
        self.pipe.send(cells)
        self.cells = cells


def fill(schedule: Schedule, measure: Measure, data: Sequence[str], options: argparse.Namespace) -> None:
    """Train what is missing until nothing is, or no run would end in time. `data` are the corpus's words."""
    began, until, broken = time.time(), schedule.until, 0
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded: the workers are the parallel part
    options.work.mkdir(parents=True, exist_ok=True)
    more = more_words(options)
    workers = [Worker.start(measure, options.work, more) for _ in range(options.workers)]
    corpus = load_data([*data, *more])  # while they import
    for worker in workers:
        worker.pipe.send(corpus)
    try:
        while True:
            for worker in workers:
                if not worker.cells:
                    busy = {cell for other in workers for cell in other.cells}
                    if cells := schedule.next(busy):
                        worker.give(cells)
            training = {worker.pipe: worker for worker in workers if worker.cells}
            if not training:
                break
            ready = wait(list(training), timeout=None if math.isinf(until) else max(0.0, until - time.time()))
            if not ready:
                lost = "; ".join(f"{w.cells[0].title} ({len(w.cells)})" for w in training.values())
                print(f"Time is up; these were not over: {lost}.", flush=True)
                break
            for pipe in ready:
                worker = training[pipe]
                cells, worker.cells = worker.cells, ()
                try:
                    rows = pipe.recv()
                except EOFError:
                    rows = f"The worker died over {cells}."
                schedule.take(cells, rows)
                for number, cell in enumerate(cells):
                    row = rows if isinstance(rows, str) else rows[number]
                    print(f"{time.time() - began:6.0f} s  {told(cell, row)}", flush=True)
                if isinstance(rows, str):
                    broken += 1
                    workers.remove(worker)
                    if broken <= BROKEN:
                        workers.append(Worker.start(measure, options.work, more))
                        workers[-1].pipe.send(corpus)
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
            worker.process.join()


def told(cell: Any, row: Row | str) -> str:
    if isinstance(row, str) or "failed" in row:
        reason = row.strip().splitlines()[-1] if isinstance(row, str) else row["failed"]
        return f"{cell.title}: FAILED, {reason}"
    return f"{cell.title}: {row.get('score', row.get('val')):.4f} in {row['seconds']:.1f} s"


def training_arguments(command: argparse.ArgumentParser, work: str) -> None:
    command.add_argument("--data", type=Path, help="the folder of a study's data, where it needs one")
    command.add_argument("--model", type=Path, help="the folder of a pretrained model, for studies of one")
    command.add_argument("--work", type=Path, default=Path(work), help="where runs go")
    command.add_argument("--minutes", type=float, default=math.inf, help="be through after so long")
    command.add_argument("--workers", type=int, default=1, help="processes")
    command.add_argument(
        "--stack", type=int, help="runs of one shape at once; default: 20 on a GPU, 1 on a CPU"
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--seeds", type=int, help="how many, from 0 on")
    command.add_argument("--set", nargs="*", default=[], help="more overrides")


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """With what the machine decides, and the commit that every row names."""
    options.commit = getattr(options, "commit", None) or require_commit()
    options.work = options.work.resolve()
    options.stack = options.stack or (20 if has_gpu(options.device) else 1)
    options.until = time.time() + 60 * options.minutes - 3
    return options


def more_words(options: argparse.Namespace) -> Words:
    """Overrides that are the machine's and the caller's."""
    more = [*options.set, f"device={options.device}"]
    folders = {"dataset.path": options.data, "model.path": options.model}
    return more + [f"{key}={folder.resolve()}" for key, folder in folders.items() if folder]


# The lines -----------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """A last line that was cut short is as if its run had not been."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path.name}: a line is cut short and was left out", file=sys.stderr)
    return found


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":  # after a line cut short
            file.write(b"\n")
        file.write((json.dumps(row, separators=(",", ":")) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def merge(folder: Path, others: Sequence[Path], same: Callable[[Row, Row], bool]) -> None:
    """Take over the cells of other folders that are not here yet: none is the `same`."""
    for source in sorted(path for other in others for path in other.glob("*.jsonl")):
        here = read(folder / source.name)
        for row in read(source):
            if not any(same(row, other) for other in here):
                here.append(row)
                append(folder / source.name, row)
        print(f"{source.name}: {len(here)} cells")


# What came out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One method against another, over the seeds that both have."""

    mean: float
    half: float  # of the 95 % interval by Student's t; infinite for one seed
    p: float
    seeds: int

    def __str__(self) -> str:
        half = "" if math.isinf(self.half) else f" ± {self.half:.1f}"
        return f"{self.mean:+.1f}{half}"


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    """None without a common seed. Equal differences, which have no spread, are no evidence: p is 1."""
    from scipy import stats

    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.inf
    if not 0 < error < math.inf:
        return Difference(mean, error, 1.0, count)
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
    return Difference(mean, quantile(count - 1) * error, p, count)


@cache
def quantile(freedom: int) -> float:
    """Of Student's t, for a two-sided 95 % interval."""
    from scipy import stats

    return float(stats.t.ppf(0.975, freedom))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(cells) + " |" for cells in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def into_page(page: Path, name: str, text: str) -> None:
    """Between the page's two marks of this name."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{page} lacks the lines {begin} and {end}.")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
