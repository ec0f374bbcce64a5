"""SAFL on real clinical text: attention against other choices of layers, FedAvg and central training.

    python benchmarks/safl.py --model DIR --mtsamples DIR --maccrobat DIR --epsilons 8 2 0.5 --workers 12

Eight clients, Dirichlet 0.5, K = 2 of MiniLM's 6 layers (--ks 2 1 3: others too), 20 rounds of one epoch.
Every method tries as many learning rates on a seed of its own, and the best by the server's validation rows
is used for all its seeds. Attention's choice hardly changes from round to round and a random one does: "once"
draws K layers for the whole run and all clients, which tells what is chosen from that it stays. "tfidf" is no
network: logistic regression on the same word pieces of all clients together, and once more on whole notes.

A cell is one run. Finished cells are lines of the file --cells and are not run again, so the table can grow
over several sittings (--minutes stops starting new ones); the plain tables come first, then each epsilon.

Intervals are paired: seeds and notes (MACCROBAT: documents) are drawn together for both sides, 2,000 times. A
method whose interval above the majority class reaches 0 "did not learn", and no claim is made on it. F1 is
macro F1 over classes; of entities strict F1. A table has the seeds that all its methods have.

With --epsilons MTSamples is run for these budgets too, clipping norms tuned as well, in larger batches and
with a rate of its own for the head: it is new, and under this noise it needs one that would ruin the layers.

So that a cell is cheap, and for all methods alike: texts are cut to --tokens, matrix products on a GPU are in
TF32, and a model is judged at the end alone.

    python benchmarks/safl.py --report-only

prints the tables of the result file as docs/results/appendix/safl.md has them.

    python benchmarks/safl.py --model DIR --write-half DEST

writes the model in float16 to DEST, half the size on the way to another machine; it trains in float32.
"""

import argparse
import io
import itertools
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, show, write_result
from provenance import require_commit
from safetensors.torch import load_file, save_file
from safl_report import report

from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.tasks.entity_tags import tag_sequences

OWN = ["strategy=safl", "partition.alpha=0.5"]
METHODS = {
    "central": ["strategy=fedavg", "partition=iid", "num_clients=1"],
    "fedavg": ["strategy=fedavg", "partition.alpha=0.5"],
    "safl": [*OWN, "strategy.select=attention"],
    "random": [*OWN, "strategy.select=random"],
    "once": [*OWN, "strategy.select=fixed"],
    "fixed": [*OWN, "strategy.select=fixed"],
    "gradient": [*OWN, "strategy.select=gradient"],
    "all": [*OWN, "strategy.select=all"],  # FedAvg with the same frozen embeddings
    "head": [*OWN, "strategy.select=none"],
}
TFIDF = ("tfidf", "tfidf_whole")
WHOLE = 4096  # word pieces: no note has more
CHOOSING = ("safl", "random", "once", "fixed", "gradient")  # K layers
PLAIN = (*TFIDF, "central", "fedavg", "all", "head", *CHOOSING)
PRIVATE = ("fedavg", "safl", "random", "head")
UNTRAINED = "untrained"
GRADIENTS_AT_ONCE = {"fedavg": 32}  # private: each example's gradient is a model, embeddings and all
TUNING_SEED = 1000  # none of those that are reported
RESAMPLES = 2000
CELLS = RESULTS / "safl-cells.jsonl"  # predictions of every run: what the tables are computed from


@dataclass(frozen=True)
class Cell:
    dataset: str
    method: str
    lr: float
    seed: int
    epsilon: float | None = None
    clip: float | None = None
    head_lr: float | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        private = (
            "" if self.epsilon is None else f"-eps{self.epsilon:g}-clip{self.clip:g}-head{self.head_lr:g}"
        )
        count = "" if self.top_k is None else f"-k{self.top_k}"
        return f"{self.dataset}-{self.method}{count}{private}-lr{self.lr:g}-seed{self.seed}"


# One cell ------------------------------------------------------------------------------------------------


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    own = METHODS["fedavg"] if cell.method == UNTRAINED else METHODS[cell.method]
    words = [
        f"dataset={cell.dataset}",
        f"dataset.path={getattr(options, cell.dataset)}",
        f"num_clients={options.clients}",
    ]
    words += ["model=checkpoint", f"model.path={options.model}", f"seed={cell.seed}", f"client.lr={cell.lr}"]
    batch = options.batch if cell.epsilon is None else options.private_batch
    words += [f"client.batch_size={batch}", f"dataset.max_tokens={options.tokens[cell.dataset]}"]
    words += ["client.local_epochs=1", "client.weight_decay=0.01", "client.lr_schedule=cosine"]
    words += ["client.precision=tf32"]
    words += [
        f"num_rounds={0 if cell.method == UNTRAINED else options.rounds}",
        f"eval_every={max(options.rounds, 1)}",
    ]
    words += ["dataset.client_validation=0", "partition.min_size=4", "checkpoint.every=0"]
    words += ["runtime.compile=false", "track.tensorboard=false", f"device={options.device}", *own]
    if cell.top_k is not None:
        words.append(f"strategy.top_k={cell.top_k}")
    if cell.method == "once":
        words.append(f"strategy.layers={drawn_once(cell, options.model)}".replace(" ", ""))
    if options.limit:
        words.append(f"dataset.limit={options.limit}")
    if cell.epsilon is not None:
        words.append(f"client.head_lr={cell.head_lr}")
        words += ["privacy=dp_sgd", f"privacy.epsilon={cell.epsilon}", f"privacy.max_grad_norm={cell.clip}"]
        words.append(f"privacy.physical_batch={GRADIENTS_AT_ONCE.get(cell.method, options.private_batch)}")
    return words


def drawn_once(cell: Cell, model: str) -> list[int]:
    """K layers for the whole run and all clients."""
    count = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    return sorted(np.random.default_rng(cell.seed).permutation(count)[: cell.top_k].tolist())


@lru_cache(maxsize=2)
def read_data(dataset: str, options: str) -> tuple[Corpus, Worker]:
    """Read once in a process; the worker judges the final models."""
    cell = Cell(dataset, "fedavg", 1e-4, 0)
    config = read(resolved(compose_config(words_for(cell, argparse.Namespace(**json.loads(options))))))
    corpus = load_corpus(config)
    return corpus, Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))


@lru_cache(maxsize=2)
def read_words(dataset: str, options: str, tokens: int) -> Corpus:
    """The same rows cut elsewhere, for a method that needs no model; read once in a process too."""
    cell = Cell(dataset, "fedavg", 1e-4, 0)
    words = words_for(cell, argparse.Namespace(**json.loads(options)))
    return load_corpus(read(resolved(compose_config([*words, f"dataset.max_tokens={tokens}"]))))


def run_cell(cell: Cell, options_text: str) -> dict[str, Any]:
    """Train and judge, in a worker process."""
    logging.getLogger("fedfrozen_app").setLevel(logging.WARNING)
    options = argparse.Namespace(**json.loads(options_text))
    torch.set_num_threads(options.threads)
    if cell.method in TFIDF:
        return by_words(cell, options_text)
    corpus, judge = read_data(cell.dataset, options_text)
    words = words_for(cell, options)
    composed = compose_run(words)
    began = time.perf_counter()
    silent = io.StringIO()  # a line a round, of so many cells
    with tempfile.TemporaryDirectory() as out, redirect_stdout(silent), redirect_stderr(silent):
        summary = run_in_process(Job(composed, Path(out)), corpus=corpus)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
        judge.load(load_file(Path(out) / "model.safetensors"), {})
    _, said = judge.task.predict(corpus.test.to(judge.device))
    if judge.device.type == "cuda":
        torch.cuda.empty_cache()  # for the other workers
    last = rows[-1]
    found = {"counts": entity_counts(corpus, said.cpu()).tolist()} if corpus.task == "tokens" else {}
    if not found:
        found = {"said": said.tolist(), "true": corpus.test.labels.tolist(), "classes": len(corpus.classes)}
    return found | {
        "cell": vars(cell),
        "setting": setting(options),
        "validation": last["val_f1" if corpus.task == "tokens" else "val_f1_macro"],
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "selection_changes": summary.get("selection_changes"),
        "epsilon": last.get("epsilon_max"),
        "clients_failed": summary["clients_failed"],
        "device": summary["device"],
        "seconds": time.perf_counter() - began,
    }


def by_words(cell: Cell, options_text: str) -> dict[str, Any]:
    """Logistic regression on the words' weights, by all clients' rows together; `lr` is its C."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    began = time.perf_counter()
    options = argparse.Namespace(**json.loads(options_text))
    tokens = WHOLE if cell.method == "tfidf_whole" else options.tokens[cell.dataset]
    corpus = read_words(cell.dataset, options_text, tokens)
    config = read(resolved(compose_config(words_for(replace(cell, method="fedavg", lr=1e-4), options))))
    shares = share_out(corpus, config, config.num_clients)
    assert shares.partition is not None
    parts = {"train": np.concatenate(shares.partition.indices), "validation": shares.validation}
    texts = {name: in_words(corpus.train.inputs, index) for name, index in parts.items()}
    labels = {name: corpus.train.labels.numpy()[index] for name, index in parts.items()}
    weights = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=cell.lr, max_iter=1000).fit(
        weights.fit_transform(texts["train"]), labels["train"]
    )
    test = in_words(corpus.test.inputs, np.arange(len(corpus.test.labels)))
    said = {name: model.predict(weights.transform(each)) for name, each in (texts | {"test": test}).items()}
    return {
        "said": said["test"].tolist(),
        "true": corpus.test.labels.tolist(),
        "classes": len(corpus.classes),
        "cell": vars(cell),
        "setting": setting(options),
        "validation": f1_score(labels["validation"], said["validation"], average="macro"),
        **dict.fromkeys(("bytes_up", "bytes_down", "selection_changes", "epsilon")),
        "clients_failed": 0,
        "device": "cpu",
        "seconds": time.perf_counter() - began,
    }


def in_words(inputs: Mapping[str, torch.Tensor], index: np.ndarray) -> list[str]:
    """The real word pieces of these rows, as numbers with spaces between."""
    ids, real = inputs["input_ids"][index], inputs["attention_mask"][index].bool()
    return [" ".join(map(str, row[kept].tolist())) for row, kept in zip(ids, real, strict=True)]


def entity_counts(corpus: Corpus, said: torch.Tensor) -> np.ndarray:
    """(documents, 1, 3): entities found, said and true."""
    from seqeval.scheme import IOB2, Entities  # which notes with one label each can do without

    counts = np.zeros((corpus.test_units.max() + 1, 1, 3), dtype=np.int64)
    tags = tag_sequences(said, corpus.test.labels, corpus.classes)
    truth, guess = (Entities(part, IOB2).entities for part in tags)
    for unit, real, found in zip(corpus.test_units, truth, guess, strict=True):
        # The first field is the sentence's number in its own list: the same on both sides.
        real, found = {e.to_tuple() for e in real}, {e.to_tuple() for e in found}
        counts[unit, 0] += (len(real & found), len(found), len(real))
    return counts


def counts_of(result: dict[str, Any]) -> np.ndarray:
    """(notes, classes, 3): right, said and true, of each class; of entities over each document, one class."""
    if "counts" in result:
        return np.array(result["counts"])
    one_hot = np.eye(result["classes"], dtype=np.int64)
    true, guess = one_hot[result["true"]], one_hot[result["said"]]
    return np.stack([true * guess, guess, true], axis=2)


def write_half(source: Path, target: Path, dtype: torch.dtype = torch.float16) -> None:
    """The folder as transformers reads it, with weights of two bytes each."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    weights = load_file(source / "model.safetensors").items()
    half = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights}
    save_file(half, target / "model.safetensors", metadata={"format": "pt"})


# Statistics ----------------------------------------------------------------------------------------------


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
    """How often each note and each seed is drawn, for both sides of every comparison alike.

    One fewer than there are: the mean of n draws out of n has (n − 1)/n of the variance that it should have,
    which of three seeds is a third too little.
    """
    rng = np.random.default_rng(0)
    return (
        rng.multinomial(max(notes - 1, 1), [1 / notes] * notes, size=RESAMPLES).astype(float),
        rng.multinomial(max(seeds - 1, 1), [1 / seeds] * seeds, size=RESAMPLES).astype(float),
    )


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def verdict(low: float, high: float, margin: float = 0.01) -> str:
    """Is the difference more than a point?"""
    return "yes" if low > margin else "no" if high < margin else "not resolved"


# Cells and their order -----------------------------------------------------------------------------------


class Cells:
    """The finished cells: lines of one file, whole or not counted, and of this setting."""

    def __init__(self, path: Path, own: dict[str, Any] | None = None, commit: str | None = None) -> None:
        self._path, self._commit = path, commit
        self._found: dict[Cell, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last sitting was ended in the middle of a line
            path.write_text(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        fitting = [line for line in lines if line.get("setting", own) == own]  # older lines do not say
        for line in fitting:
            self._keep(line)
        if others := len(lines) - len(fitting):
            print(f"{path} has {counted(others, 'cell')} of other settings (a quick try?): left alone.")

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], own: dict[str, Any]) -> "Cells":
        """Lines that have been read already."""
        cells = cls.__new__(cls)
        cells._path, cells._commit, cells._found = Path(), None, {}
        for line in lines:
            if line.get("setting", own) == own:
                cells._keep(line)
        return cells

    def _keep(self, result: dict[str, Any]) -> None:
        cell = Cell(**result["cell"])
        self._found[cell] = result | {"cell": vars(cell)}  # lines of older sittings lack newer fields

    def add(self, result: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(result | {"commit": self._commit}) + "\n")
        self._keep(result)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        return self._found.get(cell)


@dataclass(frozen=True)
class Group:
    """One table: methods that are compared on one data set, with or without a budget."""

    dataset: str
    epsilon: float | None
    methods: tuple[str, ...]
    seeds: int
    top_k: int = 2

    def cell(self, method: str) -> Cell:
        count = self.top_k if method in CHOOSING else None
        return Cell(self.dataset, method, 0.0, TUNING_SEED, self.epsilon, top_k=count)


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What all cells of a table share, and its name does not say."""
    keys = ("rounds", "clients", "batch", "private_batch", "tokens", "limit")
    return {key: getattr(options, key) for key in keys}


def groups(options: argparse.Namespace) -> list[Group]:
    """The most telling first."""
    found = []
    first, *others = options.ks
    for dataset, seeds in (("mtsamples", options.seeds), ("maccrobat", options.maccrobat_seeds)):
        if getattr(options, dataset):
            # Entities are marked in sentences: no bag of words has them.
            plain = tuple(m for m in options.methods if m not in TFIDF or dataset == "mtsamples")
            found.append(Group(dataset, None, plain, min(options.seeds, seeds), first))
    for epsilon in options.epsilons if options.mtsamples else []:
        private = tuple(options.private_methods)
        found.append(Group("mtsamples", epsilon, private, options.private_seeds, first))
    choosing = tuple(method for method in options.methods if method in CHOOSING)
    return found + [
        replace(group, methods=choosing, top_k=count)
        for count in others
        for group in found
        if group.epsilon is None
    ]


def trials(group: Group, method: str, options: argparse.Namespace) -> list[Cell]:
    """As many for every method, on a seed that is not reported."""
    cell = group.cell(method)
    if method in TFIDF:
        return [replace(cell, lr=10.0**number) for number in range(len(options.lrs))]
    if group.epsilon is None:
        return [replace(cell, lr=lr) for lr in options.lrs]
    settings = itertools.product(options.private_rates, options.clips)
    return [replace(cell, lr=lr, head_lr=head_lr, clip=clip) for (lr, head_lr), clip in settings]


def final_cells(group: Group, method: str, options: argparse.Namespace, cells: Cells) -> list[Cell]:
    """The reported cells, with the setting that did best in the trials; empty until all are there."""
    tried = trials(group, method, options)
    found = [result["validation"] for cell in tried if (result := cells.get(cell)) is not None]
    if len(found) < len(tried):
        return []
    best = tried[int(np.argmax(found))]
    return [replace(best, seed=seed) for seed in range(group.seeds)]


def untrained(group: Group) -> list[Cell]:
    return [Cell(group.dataset, UNTRAINED, 1e-4, seed) for seed in range(group.seeds)]


def known_cells(options: argparse.Namespace, cells: Cells) -> Iterator[Cell]:
    """All that can be said by now, in order. Trials and seeds take turns over the methods: whenever a sitting
    ends, the methods of a table have come equally far."""
    for group in groups(options):
        tried = [trials(group, method, options) for method in group.methods]
        final = [final_cells(group, method, options, cells) for method in group.methods]
        yield from itertools.chain.from_iterable(zip(*tried, strict=True))
        yield from untrained(group)
        yield from (cell for row in itertools.zip_longest(*final) for cell in row if cell is not None)


def planned(options: argparse.Namespace) -> int:
    """How many cells the whole is."""
    wanted = groups(options)
    blanks = {cell for group in wanted for cell in untrained(group)}
    return len(blanks) + sum(
        len(trials(group, method, options)) + group.seeds for group in wanted for method in group.methods
    )


def run_all(options: argparse.Namespace, cells: Cells) -> None:
    """Those that are not there yet, until the time is up; cells that have begun are finished."""
    text = json.dumps(vars(options))
    began = time.monotonic()
    asked: set[Cell] = set()
    running: dict[Future[dict[str, Any]], Cell] = {}
    total = planned(options)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        while True:
            for cell in known_cells(options, cells):
                if len(running) == options.workers or time.monotonic() > began + 60 * options.minutes:
                    break
                if cell not in asked and cells.get(cell) is None:
                    asked.add(cell)
                    running[pool.submit(run_cell, cell, text)] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                if (error := done.exception()) is not None:
                    print(f"FAILED {cell.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                cells.add(done.result())
                state = f"{total - missing(options, cells)}/{total} {time.monotonic() - began:.0f} s"
                print(f"{state} {cell.name} {done.result()['seconds']:.1f} s", flush=True)


def missing(options: argparse.Namespace, cells: Cells) -> int:
    done = {cell for cell in known_cells(options, cells) if cells.get(cell) is not None}
    return planned(options) - len(done)


# The tables ----------------------------------------------------------------------------------------------


def table(group: Group, options: argparse.Namespace, cells: Cells) -> tuple[list[Any], list[Any]]:
    """A row a method with its interval, and the paired differences, of the seeds that all methods have."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method in group.methods:
        known = {cell.seed: cells.get(cell) for cell in final_cells(group, method, options, cells)}
        if own := {seed: result for seed, result in known.items() if result is not None}:
            found[method] = own
    if not found:
        return [], []
    found[UNTRAINED] = {
        cell.seed: result for cell in untrained(group) if (result := cells.get(cell)) is not None
    }
    seeds = sorted(set.intersection(*(set(own) for own in found.values())))
    if not seeds:
        return [], []
    counts = {m: np.array([counts_of(own[seed]) for seed in seeds]) for m, own in found.items()}
    counts["majority"] = majority(counts[UNTRAINED])
    notes = counts["majority"].shape[1]
    drawn = draws(len(seeds), notes)
    sample = {method: resampled(own, *drawn) for method, own in counts.items()}

    about = {"dataset": group.dataset, "epsilon": group.epsilon, "seeds": len(seeds), "top_k": group.top_k}
    rows = []
    for method, values in sample.items():
        row: dict[str, Any] = about | {
            "method": method,
            "f1": float(macro_f1(counts[method].sum(axis=1)).mean()),
        }
        row["interval"] = interval(values)
        if counts[method].shape[2] > 1:
            row["accuracy"] = float((counts[method][..., 0].sum(axis=(1, 2)) / notes).mean())
        if method in group.methods:
            row["learned"] = interval(values - sample["majority"])[0] > 0
            row |= figures([found[method][seed] for seed in seeds])
        rows.append(row)
    learned = {row["method"]: row["learned"] for row in rows if "learned" in row}
    f1 = {row["method"]: row["f1"] for row in rows}
    pairs = []
    for other in ("random", "once", "fixed", "gradient", "fedavg", "all", "head", *TFIDF):
        if "safl" in learned and other in learned:
            low, high = interval(sample["safl"] - sample[other])
            claim = verdict(low, high) if learned["safl"] and learned[other] else "did not learn"
            pair = about | {
                "pair": f"safl - {other}",
                "mean": f1["safl"] - f1[other],
                "low": low,
                "high": high,
            }
            pairs.append(pair | {"more_than_a_point": claim})
    return rows, pairs


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the runs of one method cost, and the setting that its trials chose."""
    mean = {
        key: float(np.mean([result[key] for result in results]))
        for key in ("bytes_up", "bytes_down", "seconds", "selection_changes")
        if results[0][key] is not None
    }
    if results[0]["epsilon"] is not None:
        mean["epsilon_spent"] = max(result["epsilon"] for result in results)
    return mean | {key: results[0]["cell"][key] for key in ("lr", "clip", "head_lr")}


def majority(counts: np.ndarray) -> np.ndarray:
    """What always saying the most frequent class counts as; of entities nothing is said."""
    floor = counts.copy()
    floor[..., :2] = 0
    if counts.shape[2] > 1:
        top = counts[0, :, :, 2].sum(axis=0).argmax()
        floor[:, :, top, 0], floor[:, :, top, 1] = counts[:, :, top, 2], 1
    return floor


def rate_pair(word: str) -> tuple[float, float]:
    lr, head_lr = word.split(":")
    return float(lr), float(head_lr)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of MiniLM, as transformers' save_pretrained writes it")
    parser.add_argument("--mtsamples", help="folder of MTSamples")
    parser.add_argument("--maccrobat", help="folder of MACCROBAT as CoNLL")
    parser.add_argument("--methods", nargs="+", default=list(PLAIN), choices=[*TFIDF, *METHODS])
    parser.add_argument("--ks", type=int, nargs="+", default=[2], help="K; the first with all methods")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--maccrobat-seeds", type=int, default=5, help="at most --seeds")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[128, 96], help="of a note of MTSamples, and of MACCROBAT"
    )
    parser.add_argument(
        "--epsilons", type=float, nargs="*", default=[], help="budgets of the private table: 8 2 0.5"
    )
    parser.add_argument(
        "--private-rates",
        type=rate_pair,
        nargs="+",
        metavar="LR:HEAD",
        default=[(1e-4, 0.1), (3e-4, 0.03), (1e-3, 0.1), (3e-3, 0.3)],
        help="with privacy: learning rates of the layers and of the head",
    )
    parser.add_argument("--clips", type=float, nargs="+", default=[0.3, 3.0], help="clipping norms to try")
    parser.add_argument("--private-seeds", type=int, default=3)
    parser.add_argument("--private-methods", nargs="+", default=list(PRIVATE), choices=list(PRIVATE))
    parser.add_argument("--private-batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="rows, for a quick try")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="cells at once, each in a process of its own")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new cell after so long")
    parser.add_argument("--cells", default=str(CELLS), help="file of the finished cells")
    parser.add_argument("--name", default="safl", help="of the result file")
    parser.add_argument("--write-half", metavar="DEST", help="write the model there in float16, and end")
    parser.add_argument("--report-only", action="store_true", help="print the tables of the result file")
    options = parser.parse_args(words)
    if not options.model and not options.report_only:
        parser.error("give --model")
    options.tokens = dict(zip(("mtsamples", "maccrobat"), options.tokens, strict=True))
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.report_only:
        result = RESULTS / f"{options.name}.json"
        if not result.exists():
            sys.exit(f"There is no benchmarks/results/{result.name} yet: run the benchmark first.")
        found = json.loads(result.read_text())
        print(report(found, parse(shlex.split(found["command"])[2:])))
        return
    if options.write_half:
        write_half(Path(options.model), Path(options.write_half))
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    commit = require_commit()
    cells = Cells(Path(options.cells), setting(options), commit)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else None
    run_all(options, cells)
    tables = [table(group, options, cells) for group in groups(options)]
    rows = [row for found, _ in tables for row in found]
    pairs = [pair for _, found in tables for pair in found]
    left = missing(options, cells)
    path = write_result(options.name, {"lines": rows, "pairs": pairs, "cells_missing": left, "gpu": gpu})
    shown = [
        [
            *(row["dataset"], "-" if row["epsilon"] is None else f"{row['epsilon']:g}", row["method"]),
            f"{row['f1']:.3f} ({row['interval'][0]:.3f}–{row['interval'][1]:.3f})",
            "" if row.get("learned", True) else "did not learn",
            *(f"{row['accuracy']:.3f}" if "accuracy" in row else "", f"{row.get('lr', '')}"),
            *(f"{row.get('clip') or ''}", f"{row['bytes_up'] / 1e6:.0f}" if "bytes_up" in row else ""),
            str(row["seeds"]),
        ]
        for row in rows
    ]
    columns = ["data", "epsilon", "method", "F1", "", "accuracy", "lr", "clip", "MB up", "seeds"]
    show("SAFL: mean over seeds, 95 % over notes and seeds", columns, shown, {}, path)
    for pair in pairs:
        budget = "" if pair["epsilon"] is None else f" at epsilon {pair['epsilon']:g}"
        print(
            f"{pair['dataset']}{budget}: {pair['pair']} = {100 * pair['mean']:+.1f} points "
            f"({100 * pair['low']:+.1f} to {100 * pair['high']:+.1f}); "
            f"more than one point: {pair['more_than_a_point']}"
        )
    if left:
        print(f"{left} cells are missing yet: run the same command again.")


if __name__ == "__main__":
    main()
