"""Accuracy against the warm-up length, and whether `strategy.warmup_rounds=auto` finds a good one.

    python benchmarks/warmup.py digits                Dirichlet 0.1, 0.3, 1.0; seeds 0 to 9
    python benchmarks/warmup.py layers                softmax attention in 1, 2 and 4 layers; seeds 0 to 4
    python benchmarks/warmup.py cifar10 --data DIR    a folder of train.parquet and test.parquet; seeds 0 to 2

For every setting and seed the full model is trained once, with a checkpoint a round. Every warm-up length is
a fork of that run (`from=RUN/checkpoints/N`), so the common rounds are paid once; the learning rate is
constant, or a fork would not be what the whole run is. `auto` decides from the whole run's rows, and is then
the fork of that round. A run's score is the mean test accuracy of its last evaluations.

Runs are spread over `--workers` processes, and each run's score is a file of its own: started again, it goes
on with those that are missing. `--report-only` tells what is there so far; `--publish` makes figure and
Markdown of the result file.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import about, show, write_result
from provenance import require_commit

from fedfrozen_app.config import compose_config, compose_run, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report import output
from fedfrozen_app.run import evaluation
from fedfrozen_app.run.job import Job as RunJob
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.server.agreement import Agreement
from fedfrozen_app.theory import figures
from fedfrozen_app.theory.accuracy import AUTO, NEVER, evaluate, read_result, scores_of
from strategies.fedfrozen import Settings

SHARES = (0, 5, 10, 20, 50, 100)  # percent of the rounds
LABELS = (*(f"{share} %" for share in SHARES), AUTO)
LAST = 5  # evaluations that make a run's score
FIGURES = Path(__file__).parents[1] / "docs" / "figures" / "theory"


@dataclass(frozen=True)
class Setting:
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    settings: Callable[[], list[Setting]]
    rounds: int
    seeds: int


# Half the default width and twice its batch: a third of the time on a CPU core. At the default rate of 3e-3,
# held constant, ten clients with few classes each learn next to nothing.
DIGITS = (
    "model=vit_tiny",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "client.batch_size=32",
    "client.lr=1e-3",
    "eval_every=2",
)
CIFAR10 = (
    "experiment=cifar10",
    "client.weight_decay=0.01",
    "client.precision=bf16",
    "client.batch_size=32",
    "client.local_steps=20",
    "dataset.validation=0",
    "eval_every=3",
)
# Nobody looks at hundreds of runs: what only serves the eye is left out. Bits, and time, are one thread's.
PLAIN = (
    "strategy=fedfrozen",
    "dataset.client_validation=0",
    "client.lr_schedule=constant",
    "track.tensorboard=false",
    "runtime.threads=1",
)


def digits() -> list[Setting]:
    return [Setting(f"digits, Dirichlet {a}", (*DIGITS, f"partition.alpha={a}")) for a in (0.1, 0.3, 1.0)]


def layers() -> list[Setting]:
    common = (*DIGITS, "partition.alpha=0.1")
    return [
        Setting(f"{n} layer{'s' * (n > 1)}", (*common, f"model.config.num_hidden_layers={n}"))
        for n in (1, 2, 4)
    ]


def cifar10() -> list[Setting]:
    return [Setting(f"CIFAR-10, Dirichlet {a}", (*CIFAR10, f"partition.alpha={a}")) for a in (0.1, 0.5)]


STUDIES = {"digits": Study(digits, 40, 10), "layers": Study(layers, 40, 5), "cifar10": Study(cifar10, 60, 3)}


# One setting and seed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One setting and seed: the run that never freezes, and its forks."""

    words: tuple[str, ...]
    rounds: int
    key: str  # of its configuration: two settings that are the same share their runs
    folder: Path
    cells: Path

    @classmethod
    def of(cls, setting: Setting, seed: int, rounds: int, options: argparse.Namespace) -> "Job":
        words = (*PLAIN, *setting.words, f"num_rounds={rounds}", f"seed={seed}", f"device={options.device}")
        words += (*([f"dataset.path={options.data}"] if options.data else []), *options.set)
        resolved_config = resolved(compose_config(list(words)))
        elsewhere = {"device": None, "dataset": resolved_config["dataset"] | {"path": None}}
        text = json.dumps(resolved_config | elsewhere, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(words, rounds, key, options.runs.resolve() / key, cells_of(options))

    def cell(self, after: int) -> dict[str, Any] | None:
        """What the run that froze after so many rounds came to; `after` is all rounds where it never did."""
        path = self._path(after)
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, after: int, cell: dict[str, Any]) -> None:
        self.cells.mkdir(parents=True, exist_ok=True)
        replace_file(self._path(after), json.dumps(cell | {"words": self.words, "after": after}))

    def _path(self, after: int) -> Path:
        return self.cells / f"{self.key}-{after}.json"

    def after(self) -> dict[str, int]:
        """How long each warm-up is, in rounds; auto's once the whole run has shown it."""
        found = {f"{share} %": round(share * self.rounds / 100) for share in SHARES}
        whole = self.cell(self.rounds)
        return found if whole is None else found | {AUTO: whole["auto"]}

    def missing(self) -> list[int]:
        """The forks that are still to be made, the longest first."""
        wanted = {after for after in self.after().values() if after < self.rounds}
        return sorted(after for after in wanted if self.cell(after) is None)

    def needs_whole(self) -> bool:
        """Whether the run that never freezes must be made, or made again for the checkpoints it left."""
        if self.cell(self.rounds) is None:
            return True
        return any(after and not self.checkpoint(after).exists() for after in self.missing())

    def checkpoint(self, after: int) -> Path:
        return self.folder / "whole" / "checkpoints" / str(after)

    def tidy(self) -> None:
        if not self.needs_whole() and not self.missing():
            shutil.rmtree(self.folder, ignore_errors=True)


def train(job: Job, after: int, until: float) -> str | None:
    """Make one run, in a worker; None where it is too late to begin."""
    if time.time() > until:
        return None
    began = time.perf_counter()
    if after == job.rounds:
        # FedAvg to the bit, and it writes down what auto watches.
        words = [f"strategy.warmup_rounds={AUTO}", f"strategy.warmup_minimum={job.rounds}"]
        rows = run([*job.words, *words, f"checkpoint.keep={job.rounds}"], job.folder / "whole")
        more = {"auto": decided(rows, job.rounds)}
    else:
        words = [f"strategy.warmup_rounds={after}", "checkpoint.every=0"]
        words += [f"from={job.checkpoint(after)}"] if after else []
        rows, more = run([*job.words, *words], job.folder / f"after-{after}"), {}
    scores = [row["test_accuracy"] for row in rows if "test_accuracy" in row and row["round"]]
    seconds = round(time.perf_counter() - began, 1)
    job.save(after, {"score": fmean(scores[-LAST:]), "final": scores[-1], "seconds": seconds} | more)
    return f"{fmean(scores[-LAST:]):.4f} in {seconds} s"


def run(words: list[str], folder: Path) -> list[dict[str, Any]]:
    """The ordinary way: overrides in, a run folder out; returns its rows."""
    composed = compose_run(words)
    config = composed.config
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    shutil.rmtree(folder, ignore_errors=True)
    # One worker for all runs of a kind: on a GPU its step takes longer to compile than a run to train.
    if not (_kept and _kept[0].can_switch_to(config)):
        corpus = load_corpus(config)
        _kept[:] = [Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))]
    run_in_process(RunJob(composed, folder, start), worker=_kept[0])
    return read_rows(folder)


_kept: list[Worker] = []  # at most one, in a worker


def decided(rows: list[dict[str, Any]], rounds: int) -> int:
    """Where auto, with its defaults, freezes a run that has these rows."""
    agreement = Agreement(Settings(warmup_rounds=AUTO).checked(rounds).rule)
    for row in rows:
        agreement.recall(row)
    return agreement.last_round or rounds


# All of them ---------------------------------------------------------------------------------------------


def prepare() -> None:
    """In a worker: quiet, and without the pictures, which take longer to draw than a fork to train."""
    for name in ("flwr", "fedfrozen_app", "strategies"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    output.write_curves = lambda *args, **kwargs: None
    output.write_report = lambda *args: None
    evaluation.draw_labels = lambda *args: None


def fill(jobs: Mapping[str, Job], options: argparse.Namespace) -> bool:
    """Make what is missing; whether nothing failed. Whole runs come first, then their forks."""
    until = time.time() + 60 * options.minutes
    began, sound = time.time(), True
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker loads torch
    spawn = get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn, initializer=prepare) as pool:
        waiting: dict[Future[str | None], tuple[str, int]] = {}

        def submit(name: str, *afters: int) -> None:
            for after in afters:
                waiting[pool.submit(train, jobs[name], after, until)] = (name, after)

        for name, job in jobs.items():
            submit(name, *([job.rounds] if job.needs_whole() else job.missing()))
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                name, after = waiting.pop(future)
                error = future.exception()
                sound = sound and error is None
                said = future.result() if error is None else f"FAILED, {error}"
                if said is not None:
                    print(f"{time.time() - began:6.0f} s  {name}, warm-up {after}: {said}", flush=True)
                if after == jobs[name].rounds and error is None and said is not None:
                    submit(name, *jobs[name].missing())
                jobs[name].tidy()
    return sound


def jobs_of(study: str, options: argparse.Namespace) -> Iterator[tuple[str, int, Job]]:
    """Setting, seed and job; seed by seed, so that what is there when time is up is whole seeds."""
    own = STUDIES[study]
    for seed in range(options.seeds or own.seeds):
        for setting in own.settings():
            yield setting.name, seed, Job.of(setting, seed, options.rounds or own.rounds, options)


def cells_of(options: argparse.Namespace) -> Path:
    return (options.cells or options.runs / "cells").resolve()


# What came out -------------------------------------------------------------------------------------------


def report(study: str, options: argparse.Namespace) -> None:
    """The result file and a table of the seeds that are complete; what is missing is said."""
    cells, missing, words = [], [], {}
    for name, seed, job in jobs_of(study, options):
        after = job.after()
        found = {label: job.cell(after[label]) for label in LABELS if label in after}
        lacking = [label for label in LABELS if found.get(label) is None]
        if lacking:
            missing.append(f"{name}, seed {seed}: {', '.join(lacking)}")
            continue
        words[name] = [word for word in job.words if not word.startswith(("seed=", "dataset.path="))]
        for label, cell in found.items():
            stop = after[label] if after[label] < job.rounds else None
            kept = {key: cell[key] for key in ("score", "final", "seconds")}
            cells.append({"setting": name, "seed": seed, "warmup": label, "freeze_after": stop} | kept)
    for line in missing:
        print(f"missing: {line}")
    if not cells:
        print(f"{study}: no seed is complete yet.")
        return
    made = json.loads((cells_of(options) / "about.json").read_text())  # where the runs were made
    result = made | {"overrides": words, "missing": missing, "cells": cells}
    path = write_result(f"warmup_{study}", result | {"verdicts": [vars(each) for each in evaluate(cells)]})
    checks = {}
    for each in evaluate(cells):
        told = f"{each.setting}: regret {each.regret:.2f} against {each.best}, at most 1 point"
        checks[told] = each.regret <= 1
        told = f"{each.setting}: {each.behind_never:.2f} behind {NEVER}, at most 1 point"
        checks[told] = each.behind_never <= 1
    columns = ["test accuracy, %", *LABELS, "auto froze after"]
    show(f"Warm-up, {study}: mean of the last {LAST} evaluations", columns, table_of(cells), checks, path)


def table_of(cells: list[dict[str, Any]]) -> list[list[str]]:
    """A row a setting: mean and standard deviation over the seeds by warm-up, and where auto froze."""
    rows = []
    for name, by in scores_of(cells).items():
        values = [torch.tensor(list(by[label].values()), dtype=torch.float64) * 100 for label in LABELS]
        stops = [cell["freeze_after"] for cell in cells if (cell["setting"], cell["warmup"]) == (name, AUTO)]
        told = ", ".join("never" if stop is None else str(stop) for stop in stops)
        rows.append(
            [name, *(f"{v.mean():.1f} ± {v.std(correction=min(1, len(v) - 1)):.1f}" for v in values), told]
        )
    return rows


def publish(study: str) -> None:
    """From the result file: Markdown on standard output, and the figure into docs/."""
    result = read_result(Path(__file__).parent / "results", study)
    if result is None:
        raise SystemExit(f"There is no result of {study} yet.")
    cells = result["cells"]
    lines = [["setting", *LABELS, "auto froze after"], *table_of(cells)]
    print(markdown(lines))
    verdicts = [
        [each.setting, each.best, f"{each.regret:+.2f}", f"{each.behind_never:+.2f}"]
        for each in evaluate(cells)
    ]
    if verdicts:
        head = ["setting", "best fixed on seeds 0 to 4", "regret of auto, points", "behind FedAvg, points"]
        print(markdown([head, *verdicts]))
    FIGURES.mkdir(parents=True, exist_ok=True)
    figures.accuracies(study, scores_of(cells), FIGURES / f"{study}.png")


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""])


def main() -> None:
    require_commit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--data", type=Path, help="cifar10: the folder of its two parquet files")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workers", type=int, default=1, help="processes; runs are spread over them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, help="how many, from 0 on")
    parser.add_argument("--runs", type=Path, default=Path("outputs/warmup"), help="where the runs go")
    parser.add_argument("--cells", type=Path, help="where each run's score goes; default: RUNS/cells")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides, such as num_clients=20")
    parser.add_argument("--report-only", action="store_true", help="run nothing, tell what is there")
    parser.add_argument("--publish", action="store_true", help="figure and Markdown of the result file")
    options = parser.parse_args()
    if options.publish:
        for study in options.studies:
            publish(study)
        return
    if "cifar10" in options.studies and not (options.data or options.report_only):
        parser.error("cifar10 needs --data DIR")
    sound = True
    if not options.report_only:
        jobs = {}  # by key: what two studies share is run once
        for study in options.studies:
            for name, seed, job in jobs_of(study, options):
                jobs.setdefault(job.key, (f"{name}, seed {seed}", job))
        cells_of(options).mkdir(parents=True, exist_ok=True)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        made = about() | {"gpu": gpu, "device": options.device}
        (cells_of(options) / "about.json").write_text(json.dumps(made, indent=2))
        sound = fill(dict(jobs.values()), options)
    for study in options.studies:
        report(study, options)
    raise SystemExit(not sound)


if __name__ == "__main__":
    main()
