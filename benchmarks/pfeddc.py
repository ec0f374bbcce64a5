"""pFedDC and its baselines on PACS, with a dual encoder of DINOv2-small and MiniLM (it is not CLIP).

    python benchmarks/pfeddc.py --vision DIR --text DIR --data DIR   (the encoders' folders, and PACS)
    python benchmarks/pfeddc.py --carry DIR                          (as benchmarks/pfeddc_pack.py packs them)
    python benchmarks/pfeddc.py --report-only                        (tables of what is there)

First `fedfrozen align` on a fifth of PACS that no run trains or tests on. Then, for every method as many
trials as for any other, learning rates by the clients' validation rows, on a split of their own; the test
has no say. Then the cells of the tables, by importance. Every result is kept as soon as it is there, in one
file (--out): started again, the script goes on where it stopped. --minutes bounds a call.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import statistics
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_result
from pfeddc_pack import unpack_encoder
from pfeddc_report import CLIENTS, PFEDDC, PROMPTFL, PROX, gap_of, report, tables
from provenance import require_commit

from fedfrozen_app.align.command import make
from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.run.job import Job as RunJob
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.server.prompt_learning import DROWNED

ALIGN = 0.2
SPLITS = {
    "domain": ["partition=domain"],
    "domain x3": ["partition=domain", "partition.clients_per_domain=3"],
    "domain x5": ["partition=domain", "partition.clients_per_domain=5"],
    "domain x12": ["partition=domain", "partition.clients_per_domain=12", "partition.min_size=8"],
}
FUSIONS = {
    "global": ["strategy.prompts=global"],
    "sum": ["strategy.fusion=sum"],
    "cross": ["strategy.fusion=cross"],
}
METHODS = {
    "zero-shot": ["strategy.prompts=none", "num_rounds=0"],
    "local only": ["strategy.prompts=local"],
    **{
        f"{tower}, {fusion}": [f"strategy.modalities={tower}", *words]
        for tower in ("text", "vision", "both")
        for fusion, words in FUSIONS.items()
    },
    PROX: ["strategy.modalities=text", "strategy.prompts=global", "strategy.mu=0.1"],
}
MAIN = ["zero-shot", "local only", PROMPTFL, PFEDDC]
LEARNED = MAIN[1:]
REST = [method for method in METHODS if method not in MAIN]
TUNING = ("domain x3", 1.0, 100)  # split, participation, seed: a partition that no table shows
MAX_BLOCK = 16  # clients trained at once: enough to fill a GPU, and others may want its memory
LAST = 3  # rounds over which a trial is judged

Job = tuple[Any, ...]  # ("trial", method, number) or ("cell", split, participation, method, seed)


# What there is to do -------------------------------------------------------------------------------------


def rates(given: argparse.Namespace, method: str) -> list[list[float]]:
    """[prompts' rate, fusion's rate] of every trial: as many for one method as for another."""
    if method == "zero-shot":
        return [[given.lrs[0]] * 2]
    if method.endswith("cross"):
        return [[lr, times * lr] for lr, times in itertools.product(given.cross_lrs, given.fusion_times)]
    return [[lr, lr] for lr in given.lrs]


def jobs(given: argparse.Namespace) -> list[Job]:
    """By importance; a method's trials stand before its first cell."""
    seeds, both = range(given.seeds), ("domain", "domain x3")
    found: list[Job] = []

    def tune(methods: list[str]) -> None:
        tuned = [method for method in methods if len(rates(given, method)) > 1]
        found.extend(("trial", method, n) for method in tuned for n in range(len(rates(given, method))))

    def run(splits: Any, shares: Any, methods: list[str], seeds: Any) -> None:
        parts = itertools.product(seeds, splits, shares, methods)
        found.extend(("cell", split, share, method, seed) for seed, split, share, method in parts)

    tune(MAIN)
    run(both, [1.0], MAIN, seeds)
    run(["domain x5", "domain x12"], [1.0, 0.5], LEARNED, [0])
    run(both, [0.5], LEARNED, [0])
    tune(REST)
    run(both, [1.0], REST, seeds)
    run(both, [0.5], LEARNED, seeds[1:])
    wanted = [*(given.only or METHODS)]
    return [
        job
        for job in found
        if (job[0] == "trial" and job[1] in wanted)
        or (job[0] == "cell" and job[3] in wanted and job[1] in given.splits)
    ]


def best_rates(given: argparse.Namespace, state: dict[str, Any], method: str) -> list[float] | None:
    """Of the trials that came to an end, the one with which clients did best on their own validation rows.
    A fusion that drowns the global prompt is none: it would not be what its name says."""
    tried = rates(given, method)
    if len(tried) == 1:
        return tried[0]
    found = [state["trials"].get(name_of(("trial", method, n)), {}) for n in range(len(tried))]
    sound = {n: trial for n, trial in enumerate(found) if gap_of(trial) <= DROWNED}
    scores = {n: trial["score"] for n, trial in sound.items() if trial.get("score") is not None}
    return tried[max(scores, key=scores.__getitem__)] if scores else None


def name_of(job: Job) -> str:
    return json.dumps(job[1:])


# One run -------------------------------------------------------------------------------------------------


def words_of(given: argparse.Namespace, split: str, share: float, method: str, seed: int) -> list[str]:
    words = ["strategy=pfeddc", "model=checkpoint", f"model.path={given.dual}", "model.name=dinov2s+minilm"]
    words += ["dataset=parquet", "dataset.name=pacs", f"dataset.path={given.data}", f"dataset.align={ALIGN}"]
    words += [f"dataset.image_size={given.size}", "dataset.validation=0.05", "dataset.client_validation=0"]
    words += [f"num_rounds={given.rounds}", f"participation={share}", f"seed={seed}"]
    words += [f"client.local_steps={given.steps}", f"client.batch_size={given.batch}"]
    # On a batch the vision prompts' gradient had a norm of 36, the text prompts' 3.6: one rate of SGD, the
    # paper's optimiser, serves one of the towers badly, though it does learn (0.001 moved texts by 5 %).
    words += [f"client.optimizer={given.optimizer}"]
    words += [f"client.local_epochs={given.steps}"]  # never fewer steps than asked for, however few rows
    words += ["eval_every=100000", "checkpoint.every=0", "runtime.compile=false", f"device={given.device}"]
    words += ["client.precision=bf16"] if given.on_gpu else []
    words += ["runtime.runner=cohort", f"runtime.max_block={MAX_BLOCK}"] if given.cohort else []
    words += [f"dataset.limit={given.limit}"] if given.limit else []
    # The method's own words last: zero-shot has no rounds.
    return [*words, *SPLITS[split], *METHODS[method]]


@lru_cache(maxsize=1)
def corpus_of(words: tuple[str, ...]) -> Corpus:
    """Read once in a process."""
    return load_corpus(read(resolved(compose_config(list(words)))))


def work(given: argparse.Namespace, job: Job, rate: list[float]) -> dict[str, Any]:
    """Run a trial or a cell; in a worker process, or in this one."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("fedfrozen_app").setLevel(logging.WARNING)
    if given.threads:
        torch.set_num_threads(given.threads)
    corpus = corpus_of(tuple(words_of(given, "domain", 1.0, PFEDDC, 0)))
    if job[0] == "trial":
        split, share, seed = TUNING
        words = words_of(given, split, share, job[1], seed)
        words += ["dataset.client_validation=0.15", "personal=false"]
    else:
        words = words_of(given, *job[1:])
    words += [f"client.lr={rate[0]:g}", f"client.fusion_lr={rate[1]:g}"]
    composed = compose_run(words)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        try:
            summary = run_in_process(RunJob(composed, folder), corpus=corpus)
        except RunFailed as error:  # a rate too high: every update was refused
            return {"rates": rate, "failed": str(error)}
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        personal = folder / "personal.json"
        clients = json.loads(personal.read_text())["clients"] if personal.is_file() else []
    found = trial_of(rows) if job[0] == "trial" else cell_of(summary, rows, clients)
    return {"rates": rate, **found, "seconds": time.perf_counter() - began}


def learning(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether prompts learned, and whether local ones and their fusion took part."""
    last = rows[-1]
    return {
        "train_loss": [row["train_loss"] for row in rows[1:] if row.get("train_loss") is not None],
        "clients_failed": sum(row.get("clients_failed", 0) for row in rows[1:]),
        **{key: last[key] for key in last if key.startswith(("fusion_gap", "local_moved"))},
    }


def trial_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The score is the model that a client would use, its own parts with the newest global ones, before it
    trains on: the same that the tables show, on validation rows."""
    course = [row["client_val_before"] for row in rows[1:] if row.get("client_val_before") is not None]
    score = statistics.fmean(course[-LAST:]) if course else None
    return {"score": score, "client_val_before": course, **learning(rows)}


def cell_of(
    summary: dict[str, Any], rows: list[dict[str, Any]], clients: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the tables need of a run."""
    personal, trained = summary["personal"], rows[1:]
    if failed := personal.get("not_judged"):
        raise RuntimeError(f"{len(failed)} clients could not be judged: {next(iter(failed.values()))}")
    sent = {
        f"array_bytes_{way}_per_client": statistics.fmean(
            sum(row[f"bytes_{way}_by_role"].values()) / len(row["clients"]) for row in trained
        )
        if trained
        else 0
        for way in ("up", "down")
    }
    return {
        **{model: personal[model] for model in ("global", "personal", "after") if model in personal},
        "clients": {key: [client.get(key) for client in clients] for key in ("rounds", "global", "personal")},
        "global_test_accuracy": rows[-1].get("test_accuracy"),
        **sent,
        "bytes_up_per_client": (
            statistics.fmean(row["bytes_up"] / len(row["clients"]) for row in trained) if trained else 0
        ),
        "fusion": summary.get("fusion"),
        **learning(rows),
        "round_seconds": statistics.median(row["seconds"]["train"] for row in trained) if trained else 0,
    }


# All of them ---------------------------------------------------------------------------------------------


class Here:
    """Work done by this process when it is asked for: a pool's face without a pool."""

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


def run_all(given: argparse.Namespace, state: dict[str, Any], save: Any, deadline: float) -> None:
    """Those that have no result yet, until the time is up; what has begun is finished."""
    waiting = [job for job in jobs(given) if name_of(job) not in state[f"{job[0]}s"]]
    running: dict[Future[Any], Job] = {}

    def ready(job: Job) -> bool:
        """Cells wait for their method's trials, of which one at least must have come to an end."""
        open_trials = [other for other in (*waiting, *running.values()) if other[0] == "trial"]
        settled = job[0] == "trial" or all(other[1] != job[3] for other in open_trials)
        return settled and rate_of(job) is not None

    def rate_of(job: Job) -> list[float] | None:
        return rates(given, job[1])[job[2]] if job[0] == "trial" else best_rates(given, state, job[3])

    with contextlib.ExitStack() as stack:
        pool: Any = Here()
        if given.workers > 1:
            spawn = get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(given.workers, mp_context=spawn))
        while waiting or running:
            while len(running) < given.workers and time.monotonic() < deadline:
                job = next(filter(ready, waiting), None)
                if job is None:
                    break
                waiting.remove(job)
                running[pool.submit(work, given, job, rate_of(job))] = job
            if not running:
                print(f"{len(waiting)} not begun, out of time or for want of a trial: start it again.")
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                error = future.exception()
                if error is not None:  # not kept: the next start tries it again
                    print(name_of(job), "gave no result:", repr(error), flush=True)
                    continue
                state[f"{job[0]}s"][name_of(job)] = found = future.result()
                tell(job, found)
                save()


def tell(job: Job, found: dict[str, Any]) -> None:
    shown = {m: round(found[m]["mean"], 4) for m in ("global", "personal", "after") if m in found}
    words = ("score", "fusion_gap", "local_moved")
    shown |= {k: round(v, 4) for k, v in found.items() if k.startswith(words) and v is not None}
    shown |= {key: found[key] for key in ("failed", "rates", "clients_failed") if found.get(key)}
    if found.get("train_loss"):
        shown["loss"] = [round(found["train_loss"][n], 3) for n in (0, -1)]
    print(*job, shown, f"{found.get('seconds', 0):.1f} s", flush=True)


def make_dual(given: argparse.Namespace, state: dict[str, Any]) -> None:
    """Unpack the encoders where they come packed, and align them once."""
    if not (given.dual / "alignment.json").is_file():
        vision, text = given.vision, given.text
        if given.carry:
            vision = unpack_encoder(given.carry / "vision", given.work / "vision")
            text = unpack_encoder(given.carry / "text", given.work / "text")
        words = [str(given.dual), f"vision={vision}", f"text={text}", "text_pooling=mean", "epochs=40"]
        words += ["dataset=parquet", f"dataset.path={given.data}", f"dataset.image_size={given.size}"]
        words += [f"dataset.align={ALIGN}", f"device={given.device}"]
        words += [f"domain={given.align_domain}"] if given.align_domain else []
        words += [f"dataset.limit={given.limit}"] if given.limit else []
        make(words)
    found = json.loads((given.dual / "alignment.json").read_text())
    keys = ("rows", "held_out_rows", "probe_accuracy", "zero_shot_accuracy", "chance", "clearly_above_chance")
    state["alignment"] = {key: found[key] for key in keys}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--carry", type=Path, help="folder made by pfeddc_pack.py")
    parser.add_argument("--vision", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fedfrozen-pfeddc")
    parser.add_argument("--out", type=Path, default=RESULTS / "pfeddc.json")
    parser.add_argument("--report-only", action="store_true", help="write docs/ from --out and stop")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process of its own")
    parser.add_argument("--threads", type=int, default=None, help="of torch, in each of them")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no new run after so long")
    parser.add_argument("--size", type=int, default=112, help="pixels a side (a multiple of 14)")
    parser.add_argument("--align-domain", default=None, help="align on this domain of the slice alone")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="local steps a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.002, 0.008, 0.03, 0.1])
    parser.add_argument("--cross-lrs", type=float, nargs="+", default=[0.008, 0.03])
    parser.add_argument("--fusion-times", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=None, help="at most so many rows, for a quick try")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="methods, for a quick try")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cohort", action="store_true", help="stack clients on a CPU too, for a quick try")
    return parser


def main() -> None:
    parser = options()
    given = parser.parse_args()
    began = time.monotonic()
    if given.report_only:
        print(report(json.loads(given.out.read_text()), given.out.stem))
        return
    require_commit()
    if given.carry:
        given.data = given.carry / "pacs"
    if not given.data or not (given.carry or (given.vision and given.text)):
        parser.error("give --carry, or --vision, --text and --data")
    if len(given.cross_lrs) * len(given.fusion_times) != len(given.lrs):
        parser.error("give as many --lrs as there are pairs of --cross-lrs and --fusion-times: equal trials")
    given.on_gpu = torch.cuda.is_available() and given.device != "cpu"
    given.cohort = given.cohort or given.on_gpu
    given.dual = given.work / f"dual-{given.align_domain or 'all'}-{given.size}-{given.limit or 'all'}"
    given.work.mkdir(parents=True, exist_ok=True)

    keys = (
        "size",
        "align_domain",
        "rounds",
        "steps",
        "batch",
        "optimizer",
        "lrs",
        "cross_lrs",
        "fusion_times",
        "limit",
    )
    settings = {key: getattr(given, key) for key in keys}
    state: dict[str, Any] = {"settings": settings, "trials": {}, "cells": {}}
    if given.out.is_file():
        found = json.loads(given.out.read_text())
        if found["settings"] != settings:
            parser.error(f"{given.out} holds results of other settings: give another --out, or move it away")
        state = {key: found[key] for key in ("settings", "alignment", "trials", "cells")}
    state["gpu"] = torch.cuda.get_device_name() if given.on_gpu else None

    def save() -> None:
        write_result("pfeddc", state | {"lines": tables(state["cells"])}, given.out)

    make_dual(given, state)
    run_all(given, state, save, began + 60 * given.minutes)
    save()
    for line in tables(state["cells"]):
        name, clients = line["method"], CLIENTS[line["split"]]
        print(f"{clients:3} {line['participation']} {name:16} {line['personal_mean']:.3f}", line["seeds"])
    left = sum(name_of(job) not in state[f"{job[0]}s"] for job in jobs(given))
    print(f"{left} left of {len(jobs(given))}; {time.monotonic() - began:.0f} s; written to {given.out}")


if __name__ == "__main__":
    main()
