"""How long until there is a result: the end of round 1 and of round 20, with and without compiling.

    python benchmarks/first_round.py  (on a GPU; --models vit_d192 --rounds 20 --device cuda)

Models of three sizes with random weights on random rows, which take as long as real ones. FedFrozen freezes
the kernel after half of the rounds, where a step changes. Every line is fresh processes: with an empty
cache of compiled code ("cold", --repeats of them by turns), or with what a cold one left ("warm"). Clocks
start when data and imports are there: building the model, starting CUDA, compiling and recording are all in.
One process more of each model goes first and is not counted: on a fresh machine it reads CUDA's libraries and
the model's code from the disk.
"""

import io
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import arguments, in_fresh_process, show, spread, write_result
from echo import Told, app_telling
from random_rows import random_corpus

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

WISHES = ("auto", "true", "false")
STEPS = 30  # a client takes in a round


def sized(**settings: int) -> list[str]:
    return [f"+model.config.{key}={value}" for key, value in settings.items()]


# Clients, examples in a batch, side of a picture or tokens of a text, words.
MODELS: dict[str, tuple[int, int, int, list[str]]] = {
    "vit_d192": (10, 64, 32, ["dataset=digits", "model=vit_cifar"]),
    "dinov2_s": (
        *(10, 32, 84),
        [
            *("dataset=digits", "model=hub", "model.source=config", "model.path=null"),
            *("model.model_type=dinov2", "model.name=dinov2_s"),
            *sized(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14),
        ],
    ),
    "minilm": (
        *(8, 16, 128),
        [
            *("dataset=digit_words", "model=hub", "model.source=config", "model.path=null"),
            *("model.model_type=bert", "model.name=minilm", "dataset.max_tokens=128"),
            *sized(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
            *("+model.config.hidden_dropout_prob=0", "+model.config.attention_probs_dropout_prob=0"),
        ],
    ),
    "simple_cnn": (50, 10, 32, ["dataset=digits", "model=simple_cnn"]),
}
TIMED = ("vit_d192", "dinov2_s", "minilm")


def corpus_of(name: str) -> Corpus:
    """As many rows for each client as its steps need, and some to test on."""
    clients, batch, size, words = MODELS[name]
    return random_corpus("image" if "dataset=digits" in words else "text", size, clients * batch * STEPS)


def words_for(name: str, rounds: int, device: str, wish: str) -> list[str]:
    clients, batch, _, words = MODELS[name]
    common = [f"num_rounds={rounds}", f"num_clients={clients}", f"client.batch_size={batch}"]
    common += ["partition=iid", "dataset.validation=0", "dataset.client_validation=0", "eval_every=100000"]
    common += [f"client.local_steps={STEPS}", "checkpoint.every=0", "runtime.runner=cohort"]
    common += [f"runtime.compile={wish}", f"device={device}"]
    if name == "simple_cnn":  # nothing attends in it, and nothing freezes
        return [
            *common,
            *words,
            "strategy=fedavg",
            "client=sgd",
            "client.momentum=0",
            "client.precision=tf32",
        ]
    freezes = ["strategy=fedfrozen", f"strategy.warmup_rounds={rounds // 2}"]
    return [*common, *words, *freezes, "client=adamw", "client.lr=1e-4", "client.precision=bf16"]


def measure(name: str, rounds: int, device: str, wish: str, cache: str) -> dict[str, Any]:
    """Seconds until each round was over, and what was said of compiling."""
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/kernels"}
    corpus, words = corpus_of(name), words_for(name, rounds, device, wish)
    composed = compose_run(words)
    ends: list[float] = []
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "compile" in record.getMessage():
                said.append(record.getMessage())

    logger = logging.getLogger("fedfrozen_app")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    began = time.perf_counter()
    told = Told(ends=lambda number: ends.append(time.perf_counter() - began))
    with (
        tempfile.TemporaryDirectory() as folder,
        app_telling("fedfrozen", told),
        redirect_stdout(io.StringIO()),
    ):
        run_in_process(Job(composed, Path(folder)), corpus=corpus)
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    return {"ends": ends, "said": said, "peak_mb": peak}


def line(found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The figures of one process."""
    ends = found["ends"]
    each = np.diff([0.0, *ends])
    quiet = [seconds for number, seconds in enumerate(each, 1) if number > 3 and number != rounds // 2 + 1]
    return {
        "round_1": ends[0],
        f"round_{rounds}": ends[-1],
        "longest_later_round": float(max(each[1:], default=0.0)),
        "usual_round": float(np.median(quiet)) if quiet else None,
        **found,
    }


def processes(given: Any) -> Iterator[tuple[str, str, str]]:
    """Model, wish and start, by turns. What compiles the whole step takes minutes and comes last."""
    quick = [wish for wish in given.compile if wish != "true"]
    for _ in range(given.repeats):
        yield from ((name, wish, "cold") for name, wish in product(given.models, quick))
    yield from ((name, "auto", "warm") for name in given.models if "auto" in quick)
    if "true" in given.compile:
        yield from ((name, "true", start) for name, start in product(given.models, ("cold", "warm")))


def main() -> None:
    parser = arguments(__doc__ or "", repeats=2)
    parser.add_argument("--models", nargs="+", choices=TIMED, default=TIMED)
    parser.add_argument("--compile", nargs="+", choices=WISHES, default=WISHES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no process after so many")
    parser.add_argument("--out", type=Path, help="the result file, in place of results/first_round.json")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    rows, began = [], time.perf_counter()
    for name in given.models:
        with tempfile.TemporaryDirectory() as cache:
            in_fresh_process(measure, name, 1, given.device, "false", cache)
    last = f"round_{given.rounds}"
    with ExitStack() as caches:
        caches_of: dict[tuple[str, str], str] = {}
        for name, wish, start in processes(given):
            if time.perf_counter() - began > given.seconds:
                break
            if start == "cold":
                caches_of[name, wish] = caches.enter_context(tempfile.TemporaryDirectory())
            result = in_fresh_process(measure, name, given.rounds, given.device, wish, caches_of[name, wish])
            key = f"{name}, compile={wish}, {start}"
            found.setdefault(key, []).append(line(result, given.rounds))
            print(key, {k: v for k, v in found[key][-1].items() if k != "ends"}, flush=True)
            path = write_result("first_round", {"lines": found}, given.out)  # what is done is kept
    for key, lines in found.items():
        usual = [each["usual_round"] for each in lines if each["usual_round"] is not None]
        figures = (
            spread([each[what] for each in lines]) for what in ("round_1", last, "longest_later_round")
        )
        rows.append(
            [key, *(f"{each:.1f}" for each in figures), f"{1000 * median(usual):.0f}" if usual else "-"]
        )
    checks = {}
    for name in given.models:
        own = {wish: found.get(f"{name}, compile={wish}, cold", []) for wish in WISHES}
        if own["auto"]:
            checks[f"{name}: round 1 within 5 s, cold"] = median(e["round_1"] for e in own["auto"]) <= 5
            ends = {wish: median(each[last] for each in lines) for wish, lines in own.items() if lines}
            if others := [end for wish, end in ends.items() if wish != "auto"]:
                checks[f"{name}: {last} at most 10 % after the better choice"] = ends["auto"] <= 1.1 * min(
                    others
                )
    columns = ["", "round 1, s", f"{last.replace('_', ' ')}, s", "longest later round, s", "usual round, ms"]
    show("Time to a result", columns, rows, checks, path)


if __name__ == "__main__":
    sys.exit(main())
