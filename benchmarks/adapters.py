"""Adapters against whole models: score against bytes and memory, for every rule and rank.

    python benchmarks/adapters.py --mtsamples DIR --minilm DIR --pacs DIR --dinov2 DIR
    python benchmarks/adapters.py --medquad DIR --stories DIR
    python benchmarks/adapters.py --mtsamples DIR --minilm DIR --epsilons 8 2      (differential privacy)
    python benchmarks/adapters.py --quick                                          (a minute on a CPU)

MiniLM on MTSamples (8 clients, Dirichlet 0.5), DINOv2-S on PACS (a client for each domain), stories15M on
MedQuAD (a client for each source). FedAvg of the whole model, SAFL with a third of the layers, the head
alone, and LoRA on queries and values by each rule at each rank. Every method tries as many learning rates
on a seed of its own, and the best by the server's validation rows is used for all its seeds.

A cell is one run. Finished cells are lines of the file --cells and are not run again (--minutes starts no new
ones after so long). The score is macro F1 (MTSamples), accuracy (PACS) or the loss of the next token
(MedQuAD, where less is better), after the last round. Memory is the peak on the GPU, or without one that of
the process.

    python benchmarks/recompute.py --write           puts the tables into docs/results/appendix/adapters.md
"""

import argparse
import io
import itertools
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from cells import append, paired, table
from cells import read as read_lines
from common import RESULTS, peak_bytes, reset_peak, show, write_result
from provenance import require_commit

CELLS = RESULTS / "adapters.jsonl"
RULES = ("average", "ffa", "fedex", "stack")
WHOLE = {
    "fedavg": ["strategy=fedavg"],
    "safl": ["strategy=safl"],
    "head": ["strategy=safl", "strategy.select=none"],
}
TUNING_SEED = 1000  # none of those that are reported
PRIVATE_HEAD = (0.01, 0.03, 0.1, 0.3)  # a head alone under privacy: noise wants another rate


@dataclass(frozen=True)
class Study:
    """One data set and its model; `folders` are the options that name them."""

    folders: tuple[str, str]
    words: tuple[str, ...]
    score: str  # a key of a row, after `val_` and `test_`
    rates: Mapping[str, tuple[float, ...]]  # that a method tries; "" are those of adapters and of heads
    better: int = 1  # -1: less is better
    rounds: int = 20


STUDIES = {
    "mtsamples": Study(
        ("mtsamples", "minilm"),
        ("dataset=mtsamples", "num_clients=8", "partition.alpha=0.5", "partition.min_size=4",
         "dataset.max_tokens=128", "client.batch_size=32"),
        "f1_macro",
        {"": (1e-3, 3e-3, 1e-2, 3e-2), "fedavg": (1e-4, 3e-4, 1e-3, 3e-3), "safl": (1e-4, 3e-4, 1e-3, 3e-3),
         "ffa": (3e-3, 1e-2, 3e-2, 1e-1)},
    ),
    "pacs": Study(
        ("pacs", "dinov2"),
        ("dataset=parquet", "dataset.name=pacs", "partition=domain", "num_clients=null",
         "dataset.image_size=112", "client.batch_size=32"),
        "accuracy",
        {"": (1e-3, 3e-3, 1e-2), "fedavg": (1e-5, 3e-5, 1e-4), "safl": (3e-5, 1e-4, 3e-4),
         "head": (3e-3, 1e-2, 3e-2)},
        rounds=5,
    ),
    "medquad": Study(
        ("medquad", "stories"),
        ("dataset=medquad", "partition=natural", "partition.column=source", "num_clients=null",
         "dataset.max_tokens=128", "client.batch_size=32"),
        "loss",
        {"": (1e-3, 3e-3, 1e-2, 3e-2), "fedavg": (1e-4, 3e-4, 1e-3, 3e-3), "safl": (1e-4, 3e-4, 1e-3, 3e-3),
         "head": (1e-2, 3e-2, 1e-1, 3e-1)},
        better=-1,
        rounds=3,
    ),
    "quick": Study(
        ("", ""),
        # Named, because SAFL would bring others.
        ("dataset=digits", "model=vit_tiny", "num_clients=3", "partition.alpha=1", "partition.min_size=8",
         "dataset.limit=200",
         "client.batch_size=16", "model.config.hidden_size=32", "model.config.num_hidden_layers=2",
         "model.config.intermediate_size=64"),
        "accuracy",
        {"": (1e-3, 3e-3, 1e-2)},
        rounds=3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    study: str
    method: str  # of WHOLE, or a rule
    rank: int  # 0: no adapter
    lr: float
    seed: int
    epsilon: float | None = None
    clip: float | None = None

    @property
    def name(self) -> str:
        rank = f"-r{self.rank}" if self.rank else ""
        private = "" if self.epsilon is None else f"-eps{self.epsilon:g}-clip{self.clip:g}"
        return f"{self.study}-{self.method}{rank}{private}-lr{self.lr:g}-seed{self.seed}"

    @property
    def title(self) -> str:
        return f"LoRA {self.rank}, {self.method}" if self.rank else self.method


# One cell ------------------------------------------------------------------------------------------------


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    study = STUDIES[cell.study]
    rounds = options.rounds or study.rounds
    words = [*study.words, f"num_rounds={rounds}", f"eval_every={rounds}", f"seed={cell.seed}"]
    data, model = (getattr(options, folder) if folder else None for folder in study.folders)
    if data:
        words += [f"dataset.path={data}", "model=checkpoint", f"model.path={model}"]
    words += [f"client.lr={cell.lr}", "client.local_epochs=1", "client.lr_schedule=cosine"]
    words += ["dataset.client_validation=0", "checkpoint.every=0", "track.tensorboard=false"]
    words += [f"device={options.device}", f"runtime.runner={options.runner}"]
    if options.device != "cpu":
        words += [f"client.precision={options.precision}"]
    if cell.rank:
        words += ["strategy=fedavg", "adapter=lora", f"adapter.rank={cell.rank}", "adapter.alpha=16"]
        words += [f"adapter.rule={cell.method}"]
    else:
        words += WHOLE[cell.method]
    if options.limit:
        words.append(f"dataset.limit={options.limit}")
    if cell.epsilon is not None:
        words += ["privacy=dp_sgd", f"privacy.epsilon={cell.epsilon}", f"privacy.max_grad_norm={cell.clip}"]
        words += ["client.batch_size=64", "privacy.physical_batch=64"]
        words += [f"client.head_lr={cell.lr if cell.method == 'head' else options.private_head_lr}"]
    return words


@lru_cache(maxsize=len(STUDIES))
def corpus_for(study: str, options: str) -> Any:
    """Read once in a process."""
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.data.federated import load_corpus

    cell = Cell(study, "fedavg", 0, 1e-4, 0)
    words = words_for(cell, argparse.Namespace(**json.loads(options)))
    return load_corpus(read(resolved(compose_config(words))))


def run_cell(cell: Cell, options_text: str) -> dict[str, Any]:
    """Train and judge, in a worker process."""
    import torch

    from fedfrozen_app.config import compose_run
    from fedfrozen_app.run.job import Job
    from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

    logging.getLogger("fedfrozen_app").setLevel(logging.WARNING)
    options = argparse.Namespace(**json.loads(options_text))
    torch.set_num_threads(options.threads)
    corpus, words = corpus_for(cell.study, options_text), words_for(cell, options)
    composed = compose_run(words)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()
    began, silent = time.perf_counter(), io.StringIO()
    with tempfile.TemporaryDirectory() as out, redirect_stdout(silent), redirect_stderr(silent):
        summary = run_in_process(Job(composed, Path(out)), corpus=corpus)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    memory = torch.cuda.max_memory_allocated() if on_gpu else peak_bytes()
    last, score = rows[-1], STUDIES[cell.study].score
    return {
        "cell": asdict(cell),
        "setting": setting(options),
        "validation": last[f"val_{score}"],
        "score": last[f"test_{score}"],
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "trained_params": last["trained_params"],
        "memory": memory,
        "epsilon_spent": last.get("epsilon_max"),
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


# Cells and their order -----------------------------------------------------------------------------------


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What all cells share and their names do not say."""
    shared = ("rounds", "limit", "runner", "private_head_lr", "precision")
    return {key: getattr(options, key) for key in shared}


def studies(options: argparse.Namespace) -> list[str]:
    if options.quick:
        return ["quick"]
    return [name for name, own in STUDIES.items() if own.folders[0] and getattr(options, own.folders[0])]


def methods(options: argparse.Namespace, epsilon: float | None) -> list[tuple[str, int]]:
    """(method, rank). With privacy, the rules that need no more than a mean, and the head alone, which leads
    docs/results/safl.md, FedAvg and SAFL far behind it."""
    whole = [name for name in WHOLE if epsilon is None or name == "head"]
    rules = RULES if epsilon is None else ("average", "ffa")
    return [(name, 0) for name in whole] + [(rule, rank) for rank in options.ranks for rule in rules]


def tables(options: argparse.Namespace) -> list[tuple[str, float | None]]:
    """(study, epsilon): one comparison each."""
    found: list[tuple[str, float | None]] = []
    for name in studies(options):
        found += [(name, None)]
        found += [(name, epsilon) for epsilon in options.epsilons if name in ("mtsamples", "quick")]
    return found


def trials(study: str, epsilon: float | None, method: str, rank: int, options: Any) -> list[Cell]:
    """As many for every method, on a seed that is not reported."""
    known = STUDIES[study].rates
    usual = PRIVATE_HEAD if method == "head" and epsilon is not None else known.get(method, known[""])
    rates = options.lrs or usual
    clips = [None] if epsilon is None else options.clips
    return [
        Cell(study, method, rank, lr, TUNING_SEED, epsilon, clip)
        for lr, clip in itertools.product(rates, clips)
    ]


def chosen(tried: Sequence[Cell], found: dict[Cell, Any]) -> Cell | None:
    """The trial that did best on the validation rows; None until all are there. One that failed lost."""
    if not all(cell in found for cell in tried):
        return None
    better = STUDIES[tried[0].study].better
    ran = [cell for cell in tried if "failed" not in found[cell]]
    return max(ran, key=lambda cell: better * found[cell]["validation"], default=None)


def known_cells(options: argparse.Namespace, found: dict[Cell, Any]) -> Iterator[Cell]:
    """All that can be said by now: trials first, and then seed by seed, so that methods come equally far."""
    for study, epsilon in tables(options):
        tried = [trials(study, epsilon, *method, options) for method in methods(options, epsilon)]
        yield from itertools.chain.from_iterable(itertools.zip_longest(*tried))
        best = [chosen(cells, found) for cells in tried]
        yield from (
            replace(cell, seed=seed) for seed in range(options.seeds) for cell in best if cell is not None
        )


def finished(options: argparse.Namespace) -> dict[Cell, Any]:
    """The lines of this setting."""
    lines = [row for row in read_lines(Path(options.cells)) if row["setting"] == setting(options)]
    return {Cell(**row["cell"]): row for row in lines}


def run_all(options: argparse.Namespace) -> None:
    """Those that are not there yet, until the time is up; cells that have begun are finished."""
    text, began = json.dumps(vars(options)), time.monotonic()
    commit, asked = require_commit(), set[Cell]()
    found = finished(options)
    running: dict[Future[dict[str, Any]], Cell] = {}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        while True:
            for cell in known_cells(options, found):
                if len(running) == options.workers or time.monotonic() > began + 60 * options.minutes:
                    break
                if cell is not None and cell not in asked and cell not in found:
                    asked.add(cell)
                    running[pool.submit(run_cell, cell, text)] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                if (error := done.exception()) is not None:
                    from fedfrozen_app.core.errors import RunFailed

                    print(f"FAILED {cell.name}: {type(error).__name__}: {error}", flush=True)
                    if not isinstance(error, RunFailed):  # a wrong path is nobody's result
                        continue
                    row = {"cell": asdict(cell), "setting": setting(options), "failed": str(error)}
                else:
                    row = done.result()
                    print(
                        f"{time.monotonic() - began:6.0f} s  {cell.name}: {row['score']:.4f} "
                        f"in {row['seconds']:.1f} s",
                        flush=True,
                    )
                found[cell] = row
                append(Path(options.cells), row | {"commit": commit})


# The tables ----------------------------------------------------------------------------------------------


def lines_of(options: argparse.Namespace, found: dict[Cell, Any]) -> list[dict[str, Any]]:
    """A line for each method of each table, with the seeds that it has."""
    lines = []
    for study, epsilon in tables(options):
        scores: dict[tuple[str, int], dict[int, float]] = {}
        for method, rank in methods(options, epsilon):
            best = chosen(trials(study, epsilon, method, rank, options), found)
            cells = [] if best is None else [replace(best, seed=seed) for seed in range(options.seeds)]
            rows = {cell.seed: found[cell] for cell in cells if "score" in found.get(cell, {})}
            if best is None or not rows:
                continue
            scores[method, rank] = {seed: row["score"] for seed, row in rows.items()}
            mean = {
                key: fmean(row[key] for row in rows.values())
                for key in ("score", "bytes_up", "bytes_down", "memory", "seconds", "trained_params")
            }
            line = {"study": study, "epsilon": epsilon, "method": method, "rank": rank, **mean}
            line |= {"title": best.title, "lr": best.lr, "clip": best.clip, "seeds": len(rows)}
            for name, other in (("fedavg", ("fedavg", 0)), ("head", ("head", 0))):
                gap = paired(scores[method, rank], scores[other]) if other in scores else None
                if gap is not None and (method, rank) != other:
                    line[f"against_{name}"] = {
                        "mean": gap.mean,
                        "half": None if math.isinf(gap.half) else gap.half,
                        "p": gap.p,
                    }
            lines.append(line)
    return lines


def kept_lines(result: Path, anew: Sequence[str]) -> list[dict[str, Any]]:
    """Of studies that were run before, with options of their own."""
    known = json.loads(result.read_text())["lines"] if result.exists() else []
    return [line for line in known if line["study"] not in anew]


def gap_text(line: dict[str, Any], name: str) -> str:
    gap = line.get(f"against_{name}")
    if gap is None:
        return "–"
    half = "" if gap["half"] is None else f" ± {gap['half']:.3f}"
    return f"{gap['mean']:+.3f}{half}"


def cells_of(line: dict[str, Any]) -> list[str]:
    return [
        line["title"],
        f"{line['score']:.3f}",
        gap_text(line, "fedavg"),
        gap_text(line, "head"),
        f"{line['bytes_up'] / 1e6:.2f}",
        f"{line['bytes_down'] / 1e6:.2f}",
        f"{line['memory'] / 1e9:.2f}",
        f"{line['seconds']:.0f}",
        f"{line['lr']:g}",
        str(line["seeds"]),
    ]


HEAD = ["method", "score", "to FedAvg", "to the head", "MB up", "MB down", "GB", "s", "rate", "seeds"]


def report(lines: Sequence[dict[str, Any]]) -> str:
    """The tables as the page has them."""
    parts = []
    for (study, epsilon), group in itertools.groupby(lines, key=lambda one: (one["study"], one["epsilon"])):
        what = STUDIES[study].score.replace("_", " ")
        less = ", less is better" if STUDIES[study].better < 0 else ""
        budget = "" if epsilon is None else f", epsilon {epsilon:g}"
        parts.append(
            f"**{study}**{budget}: {what}{less}\n\n{table(HEAD, [cells_of(line) for line in group])}"
        )
    return "\n\n".join(parts)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("mtsamples", "minilm", "pacs", "dinov2", "medquad", "stories"):
        parser.add_argument(f"--{name}", help="folder")
    parser.add_argument("--quick", action="store_true", help="digits and a tiny model, to see it work")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--lrs", type=float, nargs="*", help="learning rates that every method tries")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="default: the study's own")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[], help="budgets: 8 2")
    parser.add_argument("--clips", type=float, nargs="+", default=[0.3, 3.0])
    parser.add_argument("--private-head-lr", type=float, default=0.1, help="with privacy: the head's rate")
    parser.add_argument("--limit", type=int, help="rows, for a quick try")
    parser.add_argument("--runner", default="auto", choices=("sequential", "cohort", "auto"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16", help="on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="cells at once, each in a process")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new cell after so long")
    parser.add_argument("--cells", default=str(CELLS), help="file of the finished cells")
    parser.add_argument("--result", type=Path, help="file of the result; default: benchmarks/results")
    options = parser.parse_args(words)
    if options.quick:
        options.ranks = [1, 2] if options.ranks == [4, 16] else options.ranks
    for name in studies(options):
        data, model = STUDIES[name].folders
        if data and not getattr(options, model):
            parser.error(f"give --{model} for --{data}")
    if not studies(options):
        parser.error("give the folders of a study, or --quick")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    result = options.result or RESULTS / "adapters.json"
    options.result = None if options.result is None else str(options.result)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_all(options)
    found = finished(options)
    lines = lines_of(options, found)
    left = sum(1 for cell in known_cells(options, found) if cell is not None and cell not in found)
    told = kept_lines(result, studies(options)) + lines
    told.sort(key=lambda line: list(STUDIES).index(line["study"]))
    path = write_result("adapters", {"lines": told, "cells_missing": left}, result)
    shown = [
        [line["study"], "" if line["epsilon"] is None else f"{line['epsilon']:g}", *cells_of(line)]
        for line in lines
    ]
    show("Adapters: means over seeds", ["data", "epsilon", *HEAD], shown, {}, path)
    if left:
        print(f"At least {left} cells are missing yet: run the same command again.")


if __name__ == "__main__":
    main()
