"""Bytes against accuracy, codec by codec, and what masked sums of few bits take.

    python benchmarks/codecs.py runs --out FILE --cifar10 DIR --mtsamples DIR --minilm DIR --workers 8
    python benchmarks/codecs.py runs --out FILE --quick                  (digits, a minute or two on a CPU)
    python benchmarks/codecs.py sums --out FILE [--values 1000000]       (masked sums, on a CPU)
    python benchmarks/codecs.py show --out FILE                          (means and paired differences)

`runs`: a small ViT on CIFAR-10 and MiniLM with LoRA on MTSamples, FedAvg and FedFrozen, uploads at 32, 16, 8
and 4 bits, the largest 10 and 1 % of changes, and masked sums of 32, 16, 12 and 8 bits. All ways of a seed
have the same partition, cohorts, batches and runner, so that differences are paired by seed. `--cells` picks
some: words that a cell's name must hold, such as `cifar10` or `fedavg-int4`.

Each finished run is one line of FILE, written at once. The same command again makes what is missing, whether
it ended or was killed; several machines may have a FILE each, whose lines are then put together.
"""

import argparse
import io
import itertools
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from cells import append, paired
from cells import read as read_lines
from codec_sums import COHORTS, show_sums, sum_all
from provenance import known_commit, require_commit

COMMON = (
    *("dataset.client_validation=0", "checkpoint.every=0", "track.tensorboard=false", "baseline=false"),
    *("client.local_epochs=1", "client.lr_schedule=cosine"),
)
ALONE = ("runtime.runner=sequential",)
MASKED = (*ALONE, "secure_aggregation=on")
SMALL_RING = (*MASKED, "secure_aggregation.rotate=true", "secure_aggregation.renew=4")  # and a clip
WAYS: dict[str, Sequence[str]] = {
    "float32": (),
    "float16": ("codec=float16",),
    "bfloat16": ("codec=bfloat16",),
    "int8": ("codec=int8",),
    "int4": ("codec=int4",),
    "int4-rotated": ("codec=int4", "codec.rotate=true"),
    "top10": ("codec=topk", "codec.share=0.1"),
    "top1": ("codec=topk", "codec.share=0.01"),
    "random10": ("codec=randomk", "codec.share=0.1"),
    "alone32": ALONE,  # float32, one client after another
    "masked32": MASKED,
    "masked16": (*SMALL_RING, "secure_aggregation.bits=16"),
    "masked12": (*SMALL_RING, "secure_aggregation.bits=12"),
    "masked8": (*SMALL_RING, "secure_aggregation.bits=8"),
}
STRATEGIES = ("fedavg", "fedfrozen")


@dataclass(frozen=True)
class Study:
    """One data set and its model; `folders` are the options that name them."""

    folders: tuple[str, ...]
    words: tuple[str, ...]
    score: str  # a key of a row
    examples: int  # a public bound of a client's rows, for masked sums
    clip: float  # and of a change, in their first round
    rounds: int = 20


STUDIES = {
    "cifar10": Study(
        ("cifar10",),
        ("dataset=parquet", "dataset.name=cifar10", "model=vit_cifar", "num_clients=10",
         "partition.alpha=0.5", "dataset.limit=10000", "client.batch_size=64", "client.lr=5e-4"),
        "test_accuracy", 2500, 0.02,
    ),
    "mtsamples": Study(
        ("mtsamples", "minilm"),
        ("dataset=mtsamples", "model=checkpoint", "num_clients=8", "partition.alpha=0.5",
         "partition.min_size=4", "dataset.max_tokens=128", "client.batch_size=32", "client.lr=1e-2",
         "adapter=lora", "adapter.rank=16"),
        "test_f1_macro", 600, 0.1,
    ),
    "quick": Study(
        (),
        ("dataset=digits", "model=vit_tiny", "num_clients=3", "partition.alpha=1", "partition.min_size=8",
         "dataset.limit=200", "client.batch_size=16", "model.config.hidden_size=32",
         "model.config.num_hidden_layers=2", "model.config.intermediate_size=64"),
        "test_accuracy", 150, 0.1, rounds=3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    study: str
    strategy: str
    way: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.study}-{self.strategy}-{self.way}-seed{self.seed}"


# Runs ---------------------------------------------------------------------------------------------------


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    study = STUDIES[cell.study]
    rounds = options.rounds or study.rounds
    words = [*COMMON, *study.words, f"num_rounds={rounds}", f"eval_every={rounds}", f"seed={cell.seed}"]
    words += [f"strategy={cell.strategy}", *WAYS[cell.way], f"device={options.device}"]
    if cell.strategy == "fedfrozen":
        words.append(f"strategy.warmup_rounds={max(rounds // 2, 1)}")
    if cell.way.startswith("masked"):
        words.append(f"secure_aggregation.max_examples={study.examples}")
    if "secure_aggregation.rotate=true" in words:
        words.append(f"secure_aggregation.clip={study.clip}")
    if "runtime.runner=sequential" not in words:
        words += ["runtime.runner=cohort", "runtime.compile=false"]
    if study.folders:
        words.append(f"dataset.path={getattr(options, study.folders[0])}")
    if "minilm" in study.folders:
        words.append(f"model.path={options.minilm}")
    return words


@lru_cache(maxsize=len(STUDIES))
def corpus_for(study: str, options: str) -> Any:
    """Read once in a process."""
    from fedfrozen_app.config import compose_run
    from fedfrozen_app.data.federated import load_corpus

    words = words_for(Cell(study, "fedavg", "float32", 0), argparse.Namespace(**json.loads(options)))
    return load_corpus(compose_run(words).config)


def run_cell(cell: Cell, options_text: str) -> dict[str, Any]:
    """Train and evaluate, in a worker process."""
    import torch

    from fedfrozen_app.config import compose_run
    from fedfrozen_app.run.job import Job
    from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

    logging.getLogger("fedfrozen_app").setLevel(logging.ERROR)
    options = argparse.Namespace(**json.loads(options_text))
    torch.set_num_threads(options.threads)
    corpus, composed = corpus_for(cell.study, options_text), compose_run(words_for(cell, options))
    began, silent = time.perf_counter(), io.StringIO()
    with tempfile.TemporaryDirectory() as out, redirect_stdout(silent), redirect_stderr(silent):
        summary = run_in_process(Job(composed, Path(out)), corpus=corpus)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    secure = [row["secure"] for row in rows if "secure" in row]
    return {
        "kind": "run",
        "cell": asdict(cell),
        "rounds": composed.config.num_rounds,
        "score": rows[-1][STUDIES[cell.study].score],
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "array_bytes_up": sum(sum(row.get("bytes_up_by_role", {}).values()) for row in rows),
        "failed": sum(row.get("clients_failed", 0) for row in rows),
        "clipped": sum(one.get("clipped", 0) for one in secure),
        "clips": [one["clip"] for one in secure if "clip" in one],
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "commit": known_commit(),
    }


def wanted(options: argparse.Namespace) -> list[Cell]:
    """By seed, so that what is done when time is up has all ways of the first seeds."""
    names = ["quick"] if options.quick else [
        name for name, study in STUDIES.items()
        if study.folders and all(getattr(options, folder) for folder in study.folders)
    ]  # fmt: skip
    everything = itertools.product(range(options.seeds), names, STRATEGIES, WAYS)
    found = [Cell(study, strategy, way, seed) for seed, study, strategy, way in everything]
    return [one for one in found if not options.cells or any(words in one.name for words in options.cells)]


def missing(options: argparse.Namespace) -> list[Cell]:
    done = {
        (Cell(**row["cell"]), row["rounds"]) for row in read_lines(options.out) if row.get("kind") == "run"
    }
    return [one for one in wanted(options) if (one, options.rounds or STUDIES[one.study].rounds) not in done]


def run_all(options: argparse.Namespace) -> list[str]:
    """Run what the file lacks; why cells have failed. A cell whose process died is begun once more."""
    text, problems = json.dumps(vars(options), default=str), dict[Cell, str]()
    deaths: dict[Cell, int] = {}
    print(f"{len(missing(options))} of {len(wanted(options))} runs are missing.", flush=True)
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end and (left := [c for c in missing(options) if c not in problems]):
        running: dict[Future[dict[str, Any]], Cell] = {}
        context, watch = get_context("spawn"), partial(leave_with, os.getpid())
        with ProcessPoolExecutor(options.workers, mp_context=context, initializer=watch) as pool:
            try:
                while left or running:
                    if time.monotonic() >= end:
                        left.clear()
                    while left and len(running) < options.workers:
                        running[pool.submit(run_cell, left[0], text)] = left[0]
                        del left[0]
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        if problem := finish(running[future], future, options.out):
                            problems[running[future]] = problem
                        del running[future]
            except BrokenExecutor:
                for cell in running.values():
                    deaths[cell] = deaths.get(cell, 0) + 1
                    if deaths[cell] > 1:
                        problems[cell] = "its process died twice"
    return [f"{cell.name}: {problem}" for cell, problem in problems.items()]


def finish(cell: Cell, future: "Future[dict[str, Any]]", out: Path) -> str:
    """Write the row of a run that has ended, or say why there is none."""
    try:
        row = future.result()
    except BrokenExecutor:
        raise
    except Exception as error:  # noqa: BLE001  (one cell's failure must not end the others)
        print(f"{cell.name}: {type(error).__name__}: {error}", flush=True)
        return str(error)
    append(out, row)
    print(f"{cell.name}: {row['score']:.4f}, {row['bytes_up']:,} bytes, {row['seconds']:.0f} s", flush=True)
    return ""


def leave_with(parent: int) -> None:
    """In a worker: end when the process that began it does, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# Tables -------------------------------------------------------------------------------------------------


def show_all(options: argparse.Namespace) -> list[str]:
    """Means over seeds and the difference from float32, with its 95 % interval; then masked sums."""
    rows = read_lines(options.out)
    scores: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if row.get("kind") == "run":
            cell = Cell(**row["cell"])
            scores.setdefault((cell.study, cell.strategy), {}).setdefault(cell.way, {})[cell.seed] = row
    for (study, strategy), ways in scores.items():
        print(f"{study}, {strategy}: score x 100, over float32, bytes up of float32")
        for way, own in ways.items():
            base = "alone32" if way.startswith("masked") else "float32"
            plain = ways.get(base, {})
            points = {seed: 100 * row["score"] for seed, row in own.items()}
            both = {seed: 100 * row["score"] for seed, row in plain.items() if seed in own}
            text = ""
            if way != base and len(both) > 1:
                gap = paired({seed: points[seed] for seed in both}, both)
                text = f"{gap.mean:+.2f} ± {gap.half:.2f}"
            bytes_up = [own[s]["array_bytes_up"] / plain[s]["array_bytes_up"] for s in own if s in plain]
            share = f"{fmean(bytes_up):.4f}" if bytes_up else "-"
            print(f"  {way:13} {len(own)} seeds  {fmean(points.values()):6.2f}  {text:16} {share}")
    show_sums(rows)
    return []


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "sums", "show"))
    parser.add_argument("--out", type=Path, required=True, help="a row for each run is appended to this file")
    parser.add_argument("--cifar10", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("--mtsamples", type=Path, help="folder of MTSamples")
    parser.add_argument("--minilm", type=Path, help="folder of MiniLM's weights and tokenizer")
    parser.add_argument("--quick", action="store_true", help="digits alone")
    parser.add_argument("--cells", nargs="+", help="those whose name holds one of these words")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="in place of each study's own")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--values", type=int, default=1_000_000, help="of an update, for sums")
    parser.add_argument("--cohorts", type=int, nargs="+", default=COHORTS, help="for sums")
    parser.add_argument("--repeats", type=int, default=3, help="of sums")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.what != "show":
        require_commit()
    problems = {"runs": run_all, "sums": sum_all, "show": show_all}[options.what](options)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
