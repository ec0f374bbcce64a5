"""SAFL on real clinical text: attention against random and fixed layers, FedAvg and central training.

    python benchmarks/safl.py --model DIR --mtsamples DIR --maccrobat DIR

Eight clients, Dirichlet 0.5, K = 2 of MiniLM's 6 layers, 20 rounds of one epoch. Every method tries the same
learning rates on a seed of its own, and the best by the server's validation rows is used for all its seeds.
A cell is one run. Finished cells are files under --cells and are not run again, so the table can grow over
several sittings (--minutes stops starting new ones).

Intervals are paired: seeds and notes (MACCROBAT: documents) are drawn together for both sides, 2,000 times. A
method whose interval above the majority class reaches 0 "did not learn", and no claim is made on it. F1 is
macro F1 over classes; of entities strict F1.

With --epsilons (needs privacy=dp_sgd) MTSamples is run for these budgets too, clipping norms tuned as well.
"""

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CACHE, show, write_result
from safetensors.torch import load_file
from seqeval.scheme import IOB2, Entities

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.models.metrics import tag_sequences
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.runtime.resident import Resident

OWN = ["strategy=safl", "partition.alpha=0.5"]
METHODS = {
    "central": ["strategy=fedavg", "partition=iid", "num_clients=1"],
    "fedavg": ["strategy=fedavg", "partition.alpha=0.5"],
    "safl": [*OWN, "strategy.select=attention", "strategy.top_k=2"],
    "random": [*OWN, "strategy.select=random", "strategy.top_k=2"],
    "fixed": [*OWN, "strategy.select=fixed", "strategy.top_k=2"],
    "all": [*OWN, "strategy.select=all"],  # FedAvg with the same frozen embeddings
    "head": [*OWN, "strategy.select=none"],
}
PLAIN = ("central", "fedavg", "safl", "random", "fixed")
PRIVATE = ("fedavg", "safl", "random", "head")
UNTRAINED = "untrained"
TUNING_SEED = 1000  # none of those that are reported
RESAMPLES = 2000


@dataclass(frozen=True)
class Cell:
    dataset: str
    method: str
    lr: float
    seed: int
    epsilon: float | None = None
    clip: float | None = None

    @property
    def name(self) -> str:
        private = "" if self.epsilon is None else f"-eps{self.epsilon:g}-clip{self.clip:g}"
        return f"{self.dataset}-{self.method}{private}-lr{self.lr:g}-seed{self.seed}"


# One cell -------------------------------------------------------------------------------------------------


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    own = METHODS["fedavg"] if cell.method == UNTRAINED else METHODS[cell.method]
    words = [
        f"dataset={cell.dataset}",
        f"dataset.path={getattr(options, cell.dataset)}",
        f"num_clients={options.clients}",
    ]
    words += ["model=checkpoint", f"model.path={options.model}", f"seed={cell.seed}", f"client.lr={cell.lr}"]
    words += [
        "client.local_epochs=1",
        "client.batch_size=16",
        "client.weight_decay=0.01",
        "client.lr_schedule=cosine",
    ]
    words += [
        f"num_rounds={0 if cell.method == UNTRAINED else options.rounds}",
        f"eval_every={max(options.rounds, 1)}",
    ]
    words += ["dataset.client_validation=0", "partition.min_size=4", "checkpoint.every=0"]
    words += ["runtime.runner=sequential", f"device={options.device}", *own]
    if options.limit:
        words.append(f"dataset.limit={options.limit}")
    if cell.epsilon is not None:
        words += ["privacy=dp_sgd", f"privacy.epsilon={cell.epsilon}", f"privacy.max_grad_norm={cell.clip}"]
    return words


@lru_cache(maxsize=2)
def read_data(dataset: str, options: str) -> tuple[Corpus, Resident]:
    """Read once in a process; the resident judges the final models."""
    cell = Cell(dataset, "fedavg", 1e-4, 0)
    config = read(resolved(compose_config(words_for(cell, argparse.Namespace(**json.loads(options))))))
    corpus = load_corpus(config)
    return corpus, Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))


def run_cell(cell: Cell, options_text: str, folder: str) -> str:
    """Train, judge, and write the cell's file; in a worker process of its own or in this one."""
    logging.getLogger("fedfrozen_app").setLevel(logging.WARNING)
    options = argparse.Namespace(**json.loads(options_text))
    torch.set_num_threads(options.threads)
    corpus, judge = read_data(cell.dataset, options_text)
    words = words_for(cell, options)
    plain = resolved(compose_config(words))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        summary = run_in_process(read(plain), plain, words, Path(out), corpus=corpus)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
        judge.load(load_file(Path(out) / "model.safetensors"), {})
    _, said = judge.task.predict(corpus.test.to(judge.device))
    last = rows[-1]
    result = {
        "cell": vars(cell),
        "validation": last.get("val_f1", last.get("val_accuracy")),
        "counts": counts_of(corpus, said.cpu()).tolist(),
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "selection_changes": summary.get("selection_changes"),
        "epsilon": last.get("epsilon_max"),
        "clients_failed": summary["clients_failed"],
        "device": summary["device"],
        "seconds": time.perf_counter() - began,
    }
    path = Path(folder) / f"{cell.name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(path)
    return cell.name


def counts_of(corpus: Corpus, said: torch.Tensor) -> np.ndarray:
    """(notes, classes, 3): right, said and true, of each class; of entities over each document, one class."""
    labels = corpus.test.labels
    if corpus.task == "tokens":
        counts = np.zeros((corpus.test_units.max() + 1, 1, 3), dtype=np.int64)
        truth, guess = (Entities(part, IOB2).entities for part in tag_sequences(said, labels, corpus.classes))
        for unit, real, found in zip(corpus.test_units, truth, guess, strict=True):
            # The first field is the sentence's number in its own list: the same on both sides.
            real, found = {e.to_tuple() for e in real}, {e.to_tuple() for e in found}
            counts[unit, 0] += (len(real & found), len(found), len(real))
        return counts
    classes = len(corpus.classes)
    true, guess = np.eye(classes, dtype=np.int64)[labels], np.eye(classes, dtype=np.int64)[said]
    return np.stack([true * guess, guess, true], axis=2)


# Statistics -----------------------------------------------------------------------------------------------


def macro_f1(sums: np.ndarray) -> np.ndarray:
    """(..., classes, 3) -> (...): the mean over classes of 2·right / (said + true)."""
    right, both = sums[..., 0], sums[..., 1] + sums[..., 2]
    return np.divide(2 * right, both, out=np.zeros_like(right, dtype=float), where=both > 0).mean(axis=-1)


def resampled(counts: np.ndarray, notes: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """F1 in each resample, (resamples,).

    counts (seeds, notes, classes, 3); notes (resamples, notes) and seeds (resamples, seeds): how often drawn.
    """
    size, total, classes, _ = counts.shape
    sums = np.einsum("rn,snc->rsc", notes, counts.reshape(size, total, classes * 3))
    scores = macro_f1(sums.reshape(len(notes), size, classes, 3))  # (resamples, seeds)
    return (scores * seeds).sum(axis=1) / seeds.sum(axis=1)


def draws(seeds: int, notes: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each note and each seed is drawn, for both sides of every comparison alike."""
    rng = np.random.default_rng(0)
    return (
        rng.multinomial(notes, [1 / notes] * notes, size=RESAMPLES).astype(float),
        rng.multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES).astype(float),
    )


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def verdict(low: float, high: float, margin: float = 0.01) -> str:
    """Is the difference more than a point?"""
    return "yes" if low > margin else "no" if high < margin else "not resolved"


# The table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of a table: a method on a data set, with or without a budget."""

    dataset: str
    method: str
    epsilon: float | None
    seeds: int


def lines(options: argparse.Namespace) -> Iterator[Line]:
    plans: list[tuple[str, Sequence[str], Sequence[float | None], int]] = []
    if options.mtsamples:
        plans.append(("mtsamples", options.methods, [None], options.seeds))
    if options.maccrobat:
        plans.append(("maccrobat", options.methods, [None], min(options.seeds, options.maccrobat_seeds)))
    if options.epsilons and options.mtsamples:
        chosen = [method for method in PRIVATE if method in options.private_methods]
        plans.append(("mtsamples", chosen, options.epsilons, options.private_seeds))
    for dataset, methods, epsilons, seeds in plans:
        for epsilon, method in itertools.product(epsilons, methods):
            yield Line(dataset, method, epsilon, seeds)


def trials(line: Line, options: argparse.Namespace) -> list[Cell]:
    clips = [None] if line.epsilon is None else options.clips
    pairs = itertools.product(options.lrs, clips)
    return [Cell(line.dataset, line.method, lr, TUNING_SEED, line.epsilon, clip) for lr, clip in pairs]


def final_cells(line: Line, options: argparse.Namespace, folder: Path) -> list[Cell]:
    """The reported cells, with the setting that did best in the trials; empty until all are there."""
    tried = trials(line, options)
    found = [result_of(cell, folder) for cell in tried]
    if any(result is None for result in found):
        return []
    scores = [
        result["validation"] if result["validation"] is not None else -1.0 for result in found if result
    ]
    best = tried[int(np.argmax(scores))]
    return [
        Cell(line.dataset, line.method, best.lr, seed, line.epsilon, best.clip) for seed in range(line.seeds)
    ]


def result_of(cell: Cell, folder: Path) -> dict[str, Any] | None:
    path = folder / f"{cell.name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def untrained(dataset: str, seeds: int) -> list[Cell]:
    return [Cell(dataset, UNTRAINED, 1e-4, seed) for seed in range(seeds)]


def run_all(cells: list[Cell], options: argparse.Namespace, folder: Path, deadline: float) -> None:
    """Those that have no file yet, until the time is up; cells that have begun are finished."""
    text = json.dumps(vars(options))
    waiting = [cell for cell in dict.fromkeys(cells) if result_of(cell, folder) is None]
    if options.workers == 1:
        for cell in waiting:
            if time.monotonic() < deadline:
                print(run_cell(cell, text, str(folder)), flush=True)
        return
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        running = set()
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < options.workers and time.monotonic() < deadline:
                running.add(pool.submit(run_cell, waiting.pop(0), text, str(folder)))
            done = next(as_completed(running))
            running.remove(done)
            print(done.result(), flush=True)


def table(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line a method with its interval, and the paired differences, of what is there so far."""
    found: dict[Line, tuple[list[dict[str, Any]], np.ndarray]] = {}
    for line in lines(options):
        results = [result_of(cell, folder) for cell in final_cells(line, options, folder)]
        if results and all(results):
            found[line] = (results, np.array([result["counts"] for result in results]))
    rows, pairs = [], []
    for dataset, epsilon in dict.fromkeys((line.dataset, line.epsilon) for line in found):
        group = {line.method: line for line in found if (line.dataset, line.epsilon) == (dataset, epsilon)}
        seeds, notes = found[next(iter(group.values()))][1].shape[:2]
        drawn = draws(seeds, notes)
        sample = {method: resampled(found[line][1], *drawn) for method, line in group.items()}
        floor = majority(next(iter(found[line][1] for line in group.values())))
        sample["majority"] = resampled(floor, *drawn)
        blank = [result_of(cell, folder) for cell in untrained(dataset, seeds)]
        extra = {"majority": floor}
        if all(blank):
            extra[UNTRAINED] = np.array([result["counts"] for result in blank if result])
            sample[UNTRAINED] = resampled(extra[UNTRAINED], *drawn)
        for method, values in sample.items():
            results = found[group[method]][0] if method in group else []
            counts = found[group[method]][1] if method in group else extra[method]
            above = interval(values - sample["majority"])
            row = {"dataset": dataset, "epsilon": epsilon, "method": method, "seeds": seeds}
            row |= {"f1": float(macro_f1(counts.sum(axis=1)).mean()), "interval": interval(values)}
            row["learned"] = above[0] > 0 if method in group else None
            if counts.shape[2] > 1:
                row["accuracy"] = float((counts[..., 0].sum(axis=(1, 2)) / notes).mean())
            if results:
                row |= {key: results[0]["cell"][key] for key in ("lr", "clip")}
                row |= {
                    key: float(np.mean([r[key] for r in results]))
                    for key in ("bytes_up", "bytes_down", "seconds")
                }
                row["selection_changes"] = results[0]["selection_changes"]
            rows.append(row)
        for one, other in (("safl", "random"), ("safl", "fixed"), ("safl", "fedavg"), ("safl", "head")):
            if one in group and other in group:
                low, high = interval(sample[one] - sample[other])
                pair = {
                    "dataset": dataset,
                    "epsilon": epsilon,
                    "pair": f"{one} - {other}",
                    "low": low,
                    "high": high,
                }
                learned = {
                    row["method"]: row["learned"]
                    for row in rows
                    if (row["dataset"], row["epsilon"]) == (dataset, epsilon)
                }
                claim = verdict(low, high) if learned[one] and learned[other] else "did not learn"
                pairs.append(
                    pair | {"mean": float((sample[one] - sample[other]).mean()), "more_than_a_point": claim}
                )
    return rows, pairs


def majority(counts: np.ndarray) -> np.ndarray:
    """What always saying the most frequent class counts as; of entities nothing is said."""
    floor = counts.copy()
    floor[..., :2] = 0
    if counts.shape[2] > 1:
        top = counts[0, :, :, 2].sum(axis=0).argmax()
        floor[:, :, top, 0], floor[:, :, top, 1] = counts[:, :, top, 2], 1
    return floor


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder of MiniLM, as transformers' save_pretrained writes it"
    )
    parser.add_argument("--mtsamples", help="folder of MTSamples")
    parser.add_argument("--maccrobat", help="folder of MACCROBAT as CoNLL")
    parser.add_argument("--methods", nargs="+", default=list(PLAIN), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--maccrobat-seeds", type=int, default=5, help="at most --seeds")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--epsilons", type=float, nargs="*", default=[], help="budgets of the private table: 8 2 0.5"
    )
    parser.add_argument("--clips", type=float, nargs="+", default=[0.1, 1.0], help="clipping norms to try")
    parser.add_argument("--private-seeds", type=int, default=3)
    parser.add_argument("--private-methods", nargs="+", default=list(PRIVATE), choices=list(PRIVATE))
    parser.add_argument("--limit", type=int, help="rows, for a quick try")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="cells at once, each in a process of its own")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new cell after so long")
    parser.add_argument("--cells", default=str(CACHE / "safl"), help="where finished cells lie")
    parser.add_argument("--name", default="safl", help="of the result file")
    return parser.parse_args(words)


def main() -> None:
    options = parse(sys.argv[1:])
    folder = Path(options.cells)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    wanted = list(lines(options))
    run_all([cell for line in wanted for cell in trials(line, options)], options, folder, deadline)
    blanks = [cell for line in wanted for cell in untrained(line.dataset, line.seeds)]
    final = [cell for line in wanted for cell in final_cells(line, options, folder)]
    run_all([*blanks, *final], options, folder, deadline)
    rows, pairs = table(options, folder)
    missing = sum(result_of(cell, folder) is None for line in wanted for cell in trials(line, options))
    missing += sum(result_of(cell, folder) is None for cell in [*dict.fromkeys(blanks), *final])
    path = write_result(options.name, {"lines": rows, "pairs": pairs, "cells_missing": missing})
    shown = [
        [
            *(row["dataset"], "-" if row["epsilon"] is None else f"{row['epsilon']:g}", row["method"]),
            f"{row['f1']:.3f} ({row['interval'][0]:.3f}–{row['interval'][1]:.3f})",
            "" if row["learned"] in (True, None) else "did not learn",
            *(f"{row['accuracy']:.3f}" if "accuracy" in row else "", f"{row.get('lr', ''):}"),
            f"{row['bytes_up'] / 1e6:.0f}" if "bytes_up" in row else "",
        ]
        for row in rows
    ]
    columns = ["data", "epsilon", "method", "F1", "", "accuracy", "lr", "MB up"]
    show("SAFL: mean over seeds, 95 % over notes and seeds", columns, shown, {}, path)
    for pair in pairs:
        budget = "" if pair["epsilon"] is None else f" at epsilon {pair['epsilon']:g}"
        print(
            f"{pair['dataset']}{budget}: {pair['pair']} = {100 * pair['mean']:+.1f} points "
            f"({100 * pair['low']:+.1f} to {100 * pair['high']:+.1f}); "
            f"more than one point: {pair['more_than_a_point']}"
        )
    if missing:
        print(f"{missing} cells are missing yet: run the same command again.")


if __name__ == "__main__":
    main()
