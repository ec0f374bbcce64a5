"""Memory on a GPU: whether a long run grows, what more clients cost, and a cohort too large for the card.

    python benchmarks/gpu_memory.py --data DIR  (a folder with train.parquet and test.parquet of CIFAR-10)

Each in a fresh process: 100 rounds with a cohort of 50 out of 100 clients, the same out of 1000, and a cohort
of 50 on a card most of which is taken. The ViT of width 192, AdamW, bf16, two local steps a round.
"""

import io
import logging
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, in_fresh_process, resident_bytes, show, write_result
from echo import Told, app_telling

from fedfrozen_app.config import compose_run
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

EARLY = 5
COHORT = 50
GROWTH_MB = 20.0


def words_for(data: str, clients: int, rounds: int, batch: int) -> list[str]:
    words = ["strategy=fedavg", "model=vit_cifar", "dataset=parquet", f"dataset.path={data}"]
    words += ["dataset.validation=0", "dataset.client_validation=0", "partition=iid", "client.precision=bf16"]
    words += [f"num_clients={clients}", f"participation={COHORT / clients}", f"client.batch_size={batch}"]
    words += [f"num_rounds={rounds}", "client.local_steps=2", "eval_every=10", "runtime.runner=cohort"]
    words += ["runtime.compile=true"]
    return [*words, "client.lr=1e-3", "client.lr_schedule=constant"]


def long_run(data: str, clients: int, rounds: int) -> dict[str, Any]:
    """Memory after each round, in MB: on the device (allocated, and its peak) and on the host (worker)."""
    words = words_for(data, clients, rounds, batch=32)
    found: dict[str, list[float]] = {"device": [], "host": []}

    def ends(number: int) -> None:
        found["device"].append(torch.cuda.memory_allocated() / 1e6)
        found["host"].append(resident_bytes() / 1e6)
        if number == EARLY:  # from here on nothing is compiled or measured any more
            torch.cuda.reset_peak_memory_stats()

    with tempfile.TemporaryDirectory() as folder, app_telling("fedavg", Told(ends=ends)):
        run(words, folder)
    return found | {"device_peak": torch.cuda.max_memory_allocated() / 1e6}


def too_large(data: str, spare_gb: float) -> dict[str, Any]:
    """What the app says and does when only so much of the card is free."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("fedfrozen_app").addHandler(Keep())
    logging.getLogger("fedfrozen_app").setLevel(logging.INFO)
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(int(free - spare_gb * 1e9), dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        summary = run(words_for(data, COHORT, 2, batch=256), folder)
    del taken
    said = [line for line in lines if "at a time" in line or "memory holds" in line]
    return {
        "spare_gb": spare_gb,
        "said": said,
        "rounds": summary["rounds"],
        "accuracy": summary["final_test_accuracy"],
    }


def run(words: list[str], folder: str) -> dict[str, Any]:
    composed = compose_run(words)
    with redirect_stdout(io.StringIO()):
        return run_in_process(Job(composed, Path(folder) / "run"))


def compare_lengths(options: Any, rows: list[Any], checks: dict[str, bool], figures: dict[str, Any]) -> None:
    """Early and late in a run, and 100 clients against 1000."""
    few, many = (
        in_fresh_process(partial(long_run, options.data, clients, options.rounds)) for clients in (100, 1000)
    )
    for clients, found in ((100, few), (1000, many)):
        for where in ("device", "host"):
            early, late = found[where][EARLY - 1], found[where][-1]
            title = f"{clients} clients, {where}, MB after round {EARLY} and {options.rounds}"
            rows.append((title, f"{early:.1f}", f"{late:.1f}"))
            checks[f"{clients}_clients_{where}_flat"] = late - early <= GROWTH_MB
            figures[f"{clients}_clients_{where}_mb"] = {"early": early, "late": late}
        figures[f"{clients}_clients_device_peak_mb"] = found["device_peak"]
    for where in ("device_peak", "host"):
        one, other = ((found[where] if where == "device_peak" else found[where][-1]) for found in (few, many))
        rows.append((f"100 and 1000 clients, {where}, MB", f"{one:.1f}", f"{other:.1f}"))
        checks[f"1000_clients_{where}_no_more_than_100"] = other <= one + GROWTH_MB


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--data", required=True, help="folder with train.parquet and test.parquet of CIFAR-10"
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=("long", "large"), default=["long", "large"])
    parser.add_argument(
        "--spare-gb", type=float, default=12.0, help="left free for the cohort that is too large"
    )
    options = parser.parse_args()
    rows, checks, figures = [], {}, {}
    if "long" in options.parts:
        compare_lengths(options, rows, checks, figures)
    if "large" in options.parts:
        large = in_fresh_process(partial(too_large, options.data, options.spare_gb))
        checks["a_cohort_too_large_trained_in_turns_and_said_so"] = large["rounds"] == 2 and bool(
            large["said"]
        )
        title = f"cohort too large for {options.spare_gb:g} GB"
        rows.append((title, " ".join(large["said"]), f"accuracy {large['accuracy']:.3f}"))
        figures["too_large"] = large
    setting = {"rounds": options.rounds, "cohort": COHORT, "spare_gb": options.spare_gb}
    result = {
        "gpu": torch.cuda.get_device_name(),
        "setting": setting,
        "figures": figures,
    }
    name = "gpu_memory" if len(options.parts) > 1 else f"gpu_memory_{options.parts[0]}"
    path = write_result(name, result | {"checks": checks})
    show("Memory on a GPU", ("", "", ""), rows, checks, path)


if __name__ == "__main__":
    main()
