"""What `runtime=ray` costs with one worker, and what more workers bring.

    python benchmarks/ray_actors.py [--part cpu|gpu|both] [--workers 1 2 4 8] [--repeats 3] [--seconds 220]

CPU: a round of 32 clients that train a small ViT one after another, one thread a worker; the same in one
process with one thread. GPU: 32 clients stacked on one GPU; in one process, by one worker, and by two workers
that share the GPU. Nothing is downloaded. Contestants take turns, the result file is written after each of
them, and none is started once `--seconds` have passed. Timed are the rounds, without the first (the workers
load their model then) and without evaluation; of each run the fastest half is what counts, because other work
on the machine only ever adds time.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import arguments, show, write_result  # noqa: E402

from fedfrozen_app.__main__ import run as command  # noqa: E402
from fedfrozen_app.files.rows import read_rows  # noqa: E402

COMMON = (
    *("strategy=fedavg", "partition=iid", "num_clients=32", "baseline=false", "personal=false"),
    *("client.batch_size=16", "client=sgd", "client.weight_decay=0"),
)
CPU = ("device=cpu", "runtime.runner=sequential", "runtime.threads=1", "client.local_epochs=4")
CPU_MODEL = (64, 4, 4)  # width, layers, heads
GPU = ("device=cuda", "runtime.runner=cohort", "runtime.compile=false", "client.local_epochs=8")
GPU_MODEL = (192, 6, 6)
TINY = ("num_clients=8", "dataset.limit=160", "partition.min_size=4")
OVERHEAD, SPEED, FEWEST = 1.05, 5.0, 8  # goals: of one worker, and of so many


def model_words(width: int, layers: int, heads: int) -> tuple[str, ...]:
    return (
        f"model.config.hidden_size={width}",
        f"model.config.intermediate_size={4 * width}",
        f"model.config.num_hidden_layers={layers}",
        f"model.config.num_attention_heads={heads}",
    )


def contestants(part: str, workers: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Their overrides, by name."""
    if part == "gpu":
        found = {"one process": ("runtime=inprocess",)}
        for count in (1, 2):
            share = ("runtime.gpus_per_worker=" + str(1 / count), f"runtime.workers={count}")
            found[f"{count} on one GPU"] = ("runtime=ray", *share)
        return found
    found = {"one process": ("runtime=inprocess",)}
    return found | {f"{n} workers": ("runtime=ray", f"runtime.workers={n}") for n in workers}


def seconds_of_rounds(words: Sequence[str], rounds: int) -> dict[str, Any]:
    """Of one run, from start to end and by round."""
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place) / "run", time.perf_counter()
        more = [f"output_dir={folder}", f"num_rounds={rounds}", f"eval_every={rounds}"]
        if command([*words, *more]):
            raise SystemExit("The run failed.")
        rows = [row["seconds"] for row in read_rows(folder) if row["round"] > 1]
    timed = [row["train"] + row["aggregate"] for row in rows]
    best = statistics.median(sorted(timed)[: max(1, len(timed) // 2)])
    return {"rounds": timed, "round": best, "whole_run": time.perf_counter() - began}


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By part: the ratios of a round's seconds, repeat by repeat, as their median and range."""
    found: dict[str, Any] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        seconds: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["part"] == part:
                seconds.setdefault(row["name"], {})[row["repeat"]] = row["round"]
        base = seconds.get("one process", {})
        first = seconds.get("1 workers") or seconds.get("1 on one GPU") or {}
        found[part] = {
            name: {
                "seconds_a_round": statistics.median(own.values()),
                "times_one_process": _ratios(own, base),
                "speed_beside_one_worker": _ratios(first, own),
            }
            for name, own in seconds.items()
        }
    return found


def _ratios(of: dict[int, float], to: dict[int, float]) -> dict[str, float] | None:
    ratios = [of[number] / to[number] for number in of if number in to]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def checks_of(found: dict[str, Any]) -> dict[str, bool]:
    checks = {}
    cpu = found.get("cpu", {})
    if (one := (cpu.get("1 workers") or {}).get("times_one_process")) is not None:
        checks[f"one worker takes at most {OVERHEAD} times one process"] = one["median"] <= OVERHEAD
    if (many := (cpu.get(f"{FEWEST} workers") or {}).get("speed_beside_one_worker")) is not None:
        checks[f"{FEWEST} workers are at least {SPEED:g} times one"] = many["median"] >= SPEED
    return checks


def main() -> None:
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--part", choices=("cpu", "gpu", "both"), default="both")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--tiny", action="store_true", help="to try the script, not to measure")
    parser.add_argument("--out", type=Path, help="another file for the result")
    given = parser.parse_args()
    parts = ["cpu", "gpu"] if given.part == "both" else [given.part]
    if not torch.cuda.is_available() and given.part == "both":
        parts = ["cpu"]
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    path = Path()
    for repeat in range(given.repeats):
        for part in parts:
            own, model = (CPU, CPU_MODEL) if part == "cpu" else (GPU, GPU_MODEL)
            common = [*COMMON, *own, *model_words(*((16, 2, 2) if given.tiny else model))]
            common += TINY if given.tiny else ()
            names = list(contestants(part, given.workers).items())
            first = repeat % len(names)
            for name, words in names[first:] + names[:first]:
                if time.perf_counter() - began > given.seconds:
                    continue
                timed = seconds_of_rounds([*common, *words], given.rounds)
                rows.append({"part": part, "name": name, "repeat": repeat, "words": list(words), **timed})
                found = summarised(rows)
                measured = {"summary": found, "checks": checks_of(found), "rows": rows}
                path = write_result("ray_actors", {"tiny": given.tiny} | measured, given.out)
    found = summarised(rows)
    table = [
        [
            part,
            name,
            f"{own['seconds_a_round']:.3f} s",
            _shown(own["times_one_process"]),
            _shown(own["speed_beside_one_worker"]),
        ]
        for part, its in found.items()
        for name, own in its.items()
    ]
    titles = ["part", "contestant", "a round", "times one process", "speed beside one worker"]
    show("Clients on Ray actors", titles, table, checks_of(found), path)


def _shown(found: dict[str, float] | None) -> str:
    return "–" if found is None else f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


if __name__ == "__main__":
    main()
