"""Memory: whether a long run grows, and how many models the server holds while it averages.

Both are the operating system's own figures for a fresh process each (resident set, and its high-water mark),
so that copies anybody makes are counted, in whatever library. The second is taken above a baseline measured
before the model exists, after rounds with a small one have loaded all code. It counts the server's model, the
running sum and the replies; the echo clients train nothing, and share the process and its base by reference.
It is taken twice: with an allocator that gives freed arrays back at once, which shows the arrays
that are alive and is what the check is on, and with the allocator as it is, which keeps a reserve of its own.
"""

import ctypes
import gc
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    arguments,
    blank_model,
    in_fresh_process,
    interleave,
    peak_bytes,
    reset_peak,
    resident_bytes,
    show,
    size_of,
    spread,
    write_result,
)
from echo import Told, app_telling, run_echo

from fedfrozen_app.config import compose_run
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

EARLY = 5
GROWTH_MB = 5.0  # what allocators and caches may move by; a leak of 0.1 MB a round would show
COHORTS = (2, 10, 50)
MOST_MODELS = 3.0
SLACK = 0.02  # in models: the code's small objects and the half MB through which norms are taken
M_MMAP_THRESHOLD = -3  # of mallopt(3)


def growth(rounds: int) -> dict[str, float]:
    """MB resident after each round of a run on digits, one local step a round."""
    torch.set_num_threads(1)
    words = [
        "model=vit_tiny",
        f"num_rounds={rounds}",
        "client.local_epochs=1",
        "client.local_steps=1",
        "device=cpu",
    ]
    composed = compose_run(words)
    found: dict[str, float] = {}

    def ends(number: int) -> None:
        found[str(number)] = settled_bytes() / 1e6

    with (
        tempfile.TemporaryDirectory() as folder,
        app_telling("fedfrozen", Told(ends=ends)),
        redirect_stdout(io.StringIO()),
    ):
        run_in_process(Job(composed, Path(folder) / "run"))
    return found


def models_held(megabytes: float, clients: int, rounds: int, gives_back: bool) -> float:
    """The largest memory in a round above the baseline, in models."""
    torch.set_num_threads(1)
    if gives_back:  # else the threshold rises to the largest array ever freed, and arrays share a heap
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**17)
    run_echo(0.03, clients, 2, Told())
    size = size_of(blank_model(megabytes))
    baseline = settled_bytes()
    peaks: list[int] = []
    told = Told(begins=lambda number: reset_peak(), ends=lambda number: peaks.append(peak_bytes()))
    run_echo(megabytes, clients, rounds, told)
    return (max(peaks) - baseline) / size


def settled_bytes() -> int:
    """The resident set without what is free already, but not yet given back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="of the long run")
    parser.add_argument("--megabytes", type=float, default=50.0, help="size of the model to average")
    options = parser.parse_args()
    if options.rounds <= EARLY:
        parser.error(f"--rounds must be above {EARLY}, from where growth is counted")

    turns: dict[str, Callable[[], Any]] = {"run": partial(in_fresh_process, growth, options.rounds)}
    for clients in COHORTS:
        held = partial(in_fresh_process, models_held, options.megabytes, clients, 4)
        turns[f"{clients} alive"] = partial(held, True)
        turns[f"{clients} as is"] = partial(held, False)
    found = interleave(turns, options.repeats)
    long_runs = found["run"]

    early, late = (spread([run[str(number)] for run in long_runs]) for number in (EARLY, options.rounds))
    grown = spread([run[str(options.rounds)] - run[str(EARLY)] for run in long_runs])
    models, as_is = (
        {str(clients): spread(found[f"{clients} {how}"]) for clients in COHORTS} for how in ("alive", "as is")
    )
    checks = {
        f"at_most_{GROWTH_MB:g}_MB_more_after_the_last_round": grown.median <= GROWTH_MB,
        f"at_most_{MOST_MODELS:g}_models_whatever_the_cohort": all(
            value.median <= MOST_MODELS + SLACK for value in models.values()
        ),
    }
    figures = {
        "resident_mb": {str(EARLY): early, str(options.rounds): late, "growth": grown},
        "resident_mb_by_round": long_runs[0],
        "models_at_peak_by_cohort": models,
        "models_at_peak_by_cohort_default_allocator": as_is,
    }
    setting = {
        "rounds": options.rounds,
        "megabytes": options.megabytes,
        "slack_models": SLACK,
        "repeats": options.repeats,
    }
    path = write_result("memory", {"setting": setting, "figures": figures, "checks": checks})
    rows = [
        (f"resident after round {EARLY}, MB", f"{early:.1f}"),
        (f"resident after round {options.rounds}, MB", f"{late:.1f}"),
        ("growth between them, MB", f"{grown:.1f}"),
    ]
    rows += [(f"models at the peak, {clients} clients", f"{value:.2f}") for clients, value in models.items()]
    rows += [(f"the same, default allocator, {clients}", f"{value:.2f}") for clients, value in as_is.items()]
    show("Memory: median (range)", ("", ""), rows, checks, path)


if __name__ == "__main__":
    main()
