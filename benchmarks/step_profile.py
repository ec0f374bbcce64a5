"""Where a step's milliseconds go on a GPU: kernels by kind, for the models of first_round.py and the CNN.

    python benchmarks/step_profile.py --models dinov2_s --compile false true

Every line is a fresh process; the profiler looks at its third round, in which nothing is compiled or recorded
any more. No round begins before the last is closed: its kernels would be over when the profiler starts.
"""

import io
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import arguments, in_fresh_process, show, write_result
from echo import Told, app_telling
from first_round import MODELS, STEPS, corpus_of, words_for
from torch.autograd import DeviceType

from fedfrozen_app.config import compose_run
from fedfrozen_app.local import cohort
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.server.base import PlannedFedAvg, Row

ROUNDS = 3
# The first that fits a kernel's name says its kind.
KINDS = {
    "fused by the compiler": r"triton",
    "our own": r"^_(normalise|shift|add_up|convolve|correlate|cut_up|multiply|take_off|square_sums)",
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|cutlass|cublas|nvjet|splitK|gemv",
    "optimiser": r"adam|sgd",
    "copies and casts": r"copy|memcpy|cat|bfloat16_copy|memset|fill",
    "norms, softmax, sums": r"layer_norm|softmax|reduce|sum",
    "other elementwise": r"elementwise|vectorized",
}


def kind_of(kernel: str) -> str:
    fits = (kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE))
    return next(fits, "other")


def measure(name: str, wish: str) -> dict[str, Any]:
    """Milliseconds of one step by kind, and the longest kernels."""
    words = words_for(name, 2 * ROUNDS, "cuda", wish)  # nothing freezes in the first half
    composed = compose_run(words)
    config = composed.config
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    began = 0.0
    wall = 0.0

    def begins(number: int) -> None:
        nonlocal began
        if number == ROUNDS:
            torch.cuda.synchronize()
            profiler.start()
            began = time.perf_counter()

    def ends(number: int) -> None:
        nonlocal wall
        if number == ROUNDS:
            torch.cuda.synchronize()
            wall = time.perf_counter() - began
            profiler.stop()

    class Stops(Told):
        def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
            return super().after_round(strategy, row)[0] or row["round"] == ROUNDS, {}

    told = Stops(begins=begins, ends=ends)
    with (
        tempfile.TemporaryDirectory() as folder,
        app_telling(config.strategy["name"], told),
        patch.object(cohort, "AHEAD_ON", ()),
        redirect_stdout(io.StringIO()),
    ):
        run_in_process(Job(composed, Path(folder)), corpus=corpus_of(name))
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    on_device = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    for event in on_device:
        milliseconds = event.time_range.elapsed_us() / 1e3 / STEPS
        kinds[kind_of(event.name)] += milliseconds
        kernels[event.name[:120]] += milliseconds
    return {
        "round_ms_a_step": 1e3 * wall / STEPS,  # with all that a round does beside its steps
        "kernels_ms_a_step": sum(kinds.values()),
        "kinds_ms_a_step": dict(kinds.most_common()),
        "longest_ms_a_step": dict(kernels.most_common(25)),
    }


def main() -> None:
    parser = arguments(__doc__ or "", repeats=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compile", nargs="+", choices=("true", "false"), default=["false", "true"])
    parser.add_argument("--out", type=Path, help="the result file, in place of results/step_profile.json")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, wish in product(given.models, given.compile):
        found[f"{name}, compile={wish}"] = in_fresh_process(measure, name, wish)
        path = write_result("step_profile", {"lines": found}, given.out)
    kinds = [*KINDS, "other"]
    rows = [
        [
            key,
            f"{figures['round_ms_a_step']:.1f}",
            f"{figures['kernels_ms_a_step']:.1f}",
            *(f"{figures['kinds_ms_a_step'].get(kind, 0.0):.1f}" for kind in kinds),
        ]
        for key, figures in found.items()
    ]
    show("Milliseconds of a step", ["", "round", "kernels", *kinds], rows, {}, path)


if __name__ == "__main__":
    sys.exit(main())
