"""Does attention choose the layers that are worth training? SAFL's choice on two public data sets.

    python benchmarks/layer_choice.py prepare --newsgroups DIR --anatem DIR --minilm DIR --data FOLDER
    python benchmarks/layer_choice.py run --data FOLDER --workers 5 --minutes 8
    python benchmarks/layer_choice.py report

Design and analysis are in docs/results/appendix/safl-choice.md, written before the first run. `prepare` takes
checkouts of yao8839836/text_gcn (20 Newsgroups by date) and cambridgeltl/MTL-Bioinformatics-2016 (AnatEM),
and a folder of all-MiniLM-L6-v2.

Each run is one row of `results/layer_choice.jsonl`, with what the model said of every test row, appended when
the run ends. Started again, the script continues with the missing runs. `--quick` tries everything in small.
"""

import argparse
import csv
import gc
import io
import logging
import os
import shutil
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import safl
from cells import Row, append, merge, read
from common import RESULTS
from layer_choice_report import (
    COUNTS,
    DATA,
    EPSILON,
    FULL,
    NAME,
    PLAIN,
    PRIVATE,
    SEEDS,
    Study,
    key_of,
)
from provenance import require_commit

RATES = (2e-4, 6e-4, 2e-3)
PRIVATE_RATES = ((3e-4, 0.03), (1e-3, 0.1))  # of the layers and of the head
CLIP = 1.0
TUNING_SEED = 2200
GRADIENTS_AT_ONCE = {"fedavg": 8}  # private: each is a model, embeddings and all; the others 16
OWN = ["strategy=safl", "strategy.top_k=2"]
ARMS = {
    "attention": [*OWN, "strategy.select=attention"],
    "once": [*OWN, "strategy.select=fixed"],
    "random": [*OWN, "strategy.select=random"],
    "fixed": [*OWN, "strategy.select=fixed"],
    "fedavg": ["strategy=fedavg"],
    "head": ["strategy=safl", "strategy.select=none"],
}
READERS = {"newsgroups": "text", "anatem": "conll"}
VALIDATION = {"newsgroups": "val_f1_macro", "anatem": "val_f1"}
QUICK = {"rounds": 2, "private_rounds": 2, "steps": 1, "tokens": 16, "limit": 240}
LONGEST = 1000  # characters of a text: far more than the model reads

# The data ------------------------------------------------------------------------------------------------


def prepare(newsgroups: Path, anatem: Path, minilm: Path, folder: Path) -> None:
    """Data and model as fedfrozen reads them, the model with half of its bytes. Of a post the text that its
    author wrote: without headers, quotations and signature, by scikit-learn's rules; posts of which nothing
    is left are dropped."""
    from sklearn.datasets import _twenty_newsgroups as rules
    from torch import bfloat16

    safl.write_half(minilm, folder / "model", bfloat16)
    for split in ("train", "test"):
        (folder / "newsgroups").mkdir(parents=True, exist_ok=True)
        (folder / "anatem").mkdir(exist_ok=True)
        rows = [("text", "label")]
        files = sorted((newsgroups / f"data/20ng/20news-bydate-{split}").glob("*/*"))
        for file in files:
            text = rules.strip_newsgroup_header(file.read_text(encoding="latin-1"))
            text = rules.strip_newsgroup_footer(rules.strip_newsgroup_quoting(text))
            if words := " ".join(text.split()):
                rows.append((words[:LONGEST], file.parent.name))
        with (folder / "newsgroups" / f"{split}.csv").open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows(rows)
        shutil.copy(anatem / f"data/AnatEM-IOB/{split}.tsv", folder / "anatem" / f"{split}.conll")
        print(f"newsgroups: {len(rows) - 1} of {len(files)} {split} posts")


# Cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run."""

    data: str
    arm: str
    seed: int
    lr: float
    epsilon: float | None = None
    head_lr: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of(vars(self))

    @property
    def title(self) -> str:
        private = "" if self.epsilon is None else f" epsilon {self.epsilon:g} head {self.head_lr:g}"
        return f"{self.data} {self.arm}{private} rate {self.lr:g} seed {self.seed}"


def setting(options: argparse.Namespace) -> dict[str, int]:
    """What all rows of a study share."""
    return QUICK if options.quick else FULL


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    own = setting(options)
    private = cell.epsilon is not None
    rounds = own["private_rounds" if private else "rounds"]
    words = [f"dataset={READERS[cell.data]}", f"dataset.path={options.data}/{cell.data}"]
    words += ["num_clients=8", "partition=dirichlet", "partition.alpha=0.5", "partition.balanced=true"]
    words += ["model=checkpoint", f"model.path={options.data}/model", f"seed={cell.seed}", *ARMS[cell.arm]]
    words += [f"num_rounds={rounds}", f"eval_every={rounds}", f"client.lr={cell.lr:g}"]
    words += ["client.batch_size=64", f"client.local_steps={own['steps']}", "client.lr_schedule=cosine"]
    words += ["client.weight_decay=0.01", "client.precision=tf32", f"dataset.max_tokens={own['tokens']}"]
    words += ["dataset.client_validation=0", "checkpoint.every=0", "runtime.compile=false", "baseline=false"]
    words += ["runtime.threads=1", "track.tensorboard=false", f"device={options.device}"]
    if cell.arm == "once":
        drawn = safl.drawn_once(
            safl.Cell(cell.data, "once", cell.lr, cell.seed, top_k=2), options.data / "model"
        )
        words.append(f"strategy.layers={drawn}".replace(" ", ""))
    if private:
        at_once = GRADIENTS_AT_ONCE.get(cell.arm, 16)
        words += [f"client.head_lr={cell.head_lr:g}", f"privacy.physical_batch={at_once}"]
        words += ["privacy=dp_sgd", f"privacy.epsilon={cell.epsilon:g}", f"privacy.max_grad_norm={CLIP:g}"]
    if own["limit"]:
        words.append(f"dataset.limit={own['limit']}")
    return [*words, *options.set]


def trials(data: str, arm: str, epsilon: float | None) -> list[Cell]:
    """As many for every arm of a table, on a seed that no table has."""
    if epsilon is None:
        return [Cell(data, arm, TUNING_SEED, lr) for lr in RATES]
    return [Cell(data, arm, TUNING_SEED, lr, epsilon, head_lr) for lr, head_lr in PRIVATE_RATES]


def best(data: str, arm: str, epsilon: float | None, rows: Sequence[Row]) -> Cell | None:
    """The trial that did best on the server's validation rows; None until all are there."""
    found = {key_of(row): row["validation"] for row in rows}
    tried = trials(data, arm, epsilon)
    if any(cell.key not in found for cell in tried):
        return None
    return max(tried, key=lambda cell: found[cell.key])


def known_cells(rows: Sequence[Row], seeds: Sequence[int]) -> Iterator[Cell]:
    """All that can be said by now, in order: trials, then seed by seed, so that whenever time is up the arms
    have come equally far. Private runs come last."""
    for epsilon, sets, arms in ((None, DATA, PLAIN), (EPSILON, ("newsgroups",), PRIVATE)):
        tried = (trials(data, arm, epsilon) for arm in arms for data in sets)
        yield from (cell for cells in tried for cell in cells)
        first, last = arms[:4], arms[4:]  # what the primary comparisons need, and the others
        for group in (first, last):
            chosen = [best(data, arm, epsilon, rows) for arm in group for data in sets]
            for seed in seeds:
                yield from (replace(cell, seed=seed) for cell in chosen if cell is not None)


# One cell ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def read_data(data: str, words: tuple[str, ...]) -> tuple[Any, Any]:
    """Read once in a process; the worker judges the final models."""
    from fedfrozen_app.config import compose_config, resolved
    from fedfrozen_app.config import read as as_config
    from fedfrozen_app.data.federated import load_corpus, share_out
    from fedfrozen_app.local.worker import Worker

    config = as_config(resolved(compose_config(list(words))))
    corpus = load_corpus(config)
    return corpus, Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))


def run_cell(cell: Cell, options: argparse.Namespace) -> tuple[Row, str]:
    """Train and judge, in a worker process: the row, and what is true of the test rows."""
    import torch
    from safetensors.torch import load_file

    from fedfrozen_app.config import compose_run
    from fedfrozen_app.files.rows import read_rows
    from fedfrozen_app.run.job import Job
    from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

    logging.getLogger("fedfrozen_app").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began, silent = time.perf_counter(), io.StringIO()  # a line a round, of so many cells
    with tempfile.TemporaryDirectory() as out, redirect_stdout(silent), redirect_stderr(silent):
        corpus, judge = read_data(cell.data, tuple(words_for(reader(cell.data), options)))
        summary = run_in_process(Job(compose_run(words_for(cell, options)), Path(out)), corpus=corpus)
        rows = read_rows(Path(out))
        judge.load(load_file(Path(out) / "model.safetensors"), {})
        _, said = judge.task.predict(corpus.test.to(judge.device))
    gc.collect()  # model, runner and recorded steps know each other
    device = "cpu"
    if judge.device.type == "cuda":
        device = torch.cuda.get_device_name()
        torch.cuda.empty_cache()  # for the other processes
    told, truth = as_text(corpus, said.cpu())
    row = {
        **vars(cell),
        **setting(options),
        "validation": rows[-1][VALIDATION[cell.data]],
        "said": told,
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "selection_changes": summary.get("selection_changes"),
        "epsilon_spent": rows[-1].get("epsilon_max"),
        "clients_failed": summary["clients_failed"],
        "seconds": round(time.perf_counter() - began, 1),
        "device": device,
    }
    return row, truth


def reader(data: str) -> Cell:
    return Cell(data, "fedavg", 0, RATES[0])


def as_text(corpus: Any, said: Any) -> tuple[str, str]:
    """One character per test row: its class. Of tagged sentences two: entities found, and entities said; and
    of the truth one."""
    if corpus.task != "tokens":
        told, truth = (
            "".join(string.ascii_letters[n] for n in row.tolist()) for row in (said, corpus.test.labels)
        )
        return told, truth
    counts = safl.entity_counts(corpus, said)[:, 0]
    return "".join(COUNTS[n] for n in counts[:, :2].ravel()), "".join(COUNTS[n] for n in counts[:, 2])


# All of them ---------------------------------------------------------------------------------------------


class Rows:
    """The file: one line per run, and one per data set with the truth of its test rows."""

    def __init__(self, path: Path, own: dict[str, int], commit: str) -> None:
        self.path, self.commit = path, commit
        lines = [row for row in read(path) if all(row[key] == value for key, value in own.items())]
        self.truth = {row["data"]: row["truth"] for row in lines if "truth" in row}
        self.rows = [row for row in lines if "truth" not in row]
        self.own = own

    def take(self, row: Row, truth: str) -> None:
        if row["data"] not in self.truth:
            self.truth[row["data"]] = truth
            append(self.path, {"data": row["data"], "commit": self.commit, **self.own, "truth": truth})
        if self.truth[row["data"]] != truth:
            raise SystemExit(f"{self.path} has other test rows of {row['data']} than this folder.")
        self.rows.append(row)
        append(self.path, row | {"commit": self.commit})


def run_all(options: argparse.Namespace) -> int:
    """Until the time is up; runs that have begun are finished. Returns how many are still missing."""
    began, rows = time.monotonic(), Rows(options.rows, setting(options), require_commit())
    asked: set[tuple[Any, ...]] = {key_of(row) for row in rows.rows}
    running: dict[Future[tuple[Row, str]], Cell] = {}
    failed: list[Cell] = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        while True:
            for cell in known_cells(rows.rows, SEEDS[: options.seeds]):
                late = time.monotonic() > began + 60 * options.minutes
                if len(running) == options.workers or late or len(failed) > 5:
                    break
                if cell.key not in asked:
                    asked.add(cell.key)
                    running[pool.submit(run_cell, cell, options)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell, past = running.pop(future), time.monotonic() - began
                if (error := future.exception()) is not None:
                    failed.append(cell)
                    traceback.print_exception(error, file=sys.stderr)
                    print(f"{past:5.0f} s  {cell.title}: FAILED, {error}", flush=True)
                    continue
                row, truth = future.result()
                rows.take(row, truth)
                val, seconds = row["validation"], row["seconds"]
                print(f"{past:5.0f} s  {cell.title}: {val:.4f} in {seconds:.1f} s", flush=True)
    done = {key_of(row) for row in rows.rows}
    return sum(cell.key not in done for cell in known_cells(rows.rows, SEEDS[: options.seeds]))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="write the data as fedfrozen reads them")
    command.add_argument("--newsgroups", type=Path, required=True)
    command.add_argument("--anatem", type=Path, required=True)
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("--data", type=Path, required=True, help="the folder to write")
    command = commands.add_parser("run", help="train what is missing")
    command.add_argument("--data", type=Path, required=True, help="the folder that `prepare` wrote")
    command.add_argument("--workers", type=int, default=1, help="runs at once, each in a process of its own")
    command.add_argument("--minutes", type=float, default=1e9, help="start no new run after so long")
    command.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from the first on")
    command.add_argument("--quick", action="store_true", help="few rows and rounds, to try everything")
    command.add_argument("--device", default="auto")
    command.add_argument("--set", nargs="*", default=[], help="more overrides")
    commands.add_parser("report", help="tables of what is there; recompute.py writes the pages")
    command = commands.add_parser("merge", help="add rows of other folders")
    command.add_argument("others", type=Path, nargs="+")
    for command in commands.choices.values():
        command.add_argument("--rows", type=Path, default=RESULTS / NAME)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.command == "prepare":
        prepare(options.newsgroups, options.anatem, options.minilm, options.data)
    elif options.command == "merge":
        merge(options.rows.parent, options.others, same_line)
    elif options.command == "report":
        study = Study(read(options.rows))
        tables = (study.primary(), study.others(), study.private(), study.table(), study.trials())
        print(*tables, study.account(), sep="\n\n")
    else:
        options.data = options.data.resolve()
        if left := run_all(options):
            print(f"{left} runs are missing yet: run the same command again.")


def same_line(one: Row, other: Row) -> bool:
    if "truth" in one or "truth" in other:
        return one.get("truth") == other.get("truth")
    return key_of(one) == key_of(other)


if __name__ == "__main__":
    main()
