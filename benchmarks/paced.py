"""Virtual time to an accuracy: synchronous rounds, deadlines and buffers; and what frozen bytes are worth.

    python benchmarks/paced.py runs --out FILE --cifar10 DIR --workers 6 --minutes 9
    python benchmarks/paced.py runs --out FILE --quick               (digits, minutes on a CPU)
    python benchmarks/paced.py show --out FILE

Each finished run is one line of FILE, written at once. The same command again makes what is missing, whether
it ended or was killed. `--cells` picks some: words that a cell's name must hold, such as `cifar10` on a GPU,
or, with `--device cpu`, `nvflare`.

The design, written before the runs
-----------------------------------
Setting. CIFAR-10, 25,000 training images over 100 clients by Dirichlet(0.3), all 10,000 test images; the
ViT of width 192 from scratch (`model=vit_cifar`), one local epoch, batches of 32, AdamW at a constant rate
(so that no schedule ties accuracy to the number of steps); ten clients at work. Speeds are lognormal with
deviation 1 around 50 GFLOP/s; every uplink has 10 Mbit/s, every downlink 50.
Methods. FedAvg, FedFrozen (frozen after half of the synchronous updates) and LoRA of rank 8 on all
projections. There is no pretrained ViT of this size: LoRA adapts a base at its random initialisation, far
from its use.
Pacings. Synchronous: 100 rounds of 10 clients. Deadline: rounds close with 8 of 10 replies, late ones
count, 125 rounds. Buffered: 10 at work, steps of 5 replies, weight 1/sqrt(1+staleness), 300 steps: half as
many updates more than synchronous, because stale updates count less.
Target. Of a method and seed: the mean of the last five evaluations of its synchronous run. A run reaches it
at the first evaluation whose mean with the two before is at least that; a synchronous run by the same rule.
Outcome. The ratio of virtual times, synchronous over paced, paired by seed: geometric mean and its 95 %
interval by Student's t on logarithms over five seeds. A run that never reaches its target has no ratio; how
many did is in the table, and where fewer than all did, the mean is over those and says too much. Expected:
buffered at least twice as quick for FedAvg.
Links. A synchronous run's training does not depend on links: its times at 1 and 100 Mbit/s are computed
from the parts of its own clients' times. Under the other pacings the order of replies depends on them, and
those are run again, buffered alone. What frozen bytes are worth is FedFrozen's time over FedAvg's: for the
same rounds, and until the lower of the two methods' targets of that seed.
NVFLARE. The setting of its edge example (examples/advanced/edge of NVIDIA/NVFlare, `pt_job.py`): 16 devices
of 3,125 images, a LeNet, 4 epochs in batches of 4, SGD at 0.001 with momentum 0.9; local training takes
about 100, 200 or 400 s by a device's type, messages 5 s; 10 synchronous rounds, or 160 steps of one reply
each at a server rate of 0.05 without staleness weight. It reports 82 and 45 minutes of wall time, from
which it takes 10 of computing, and accuracies in a picture alone. Types are drawn by seed; times within a
type do not vary here.
"""

import argparse
import io
import itertools
import json
import logging
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cells import read as read_lines
from paced_tables import show_all
from provenance import known_commit, require_commit
from run_pool import run_missing

UPLINKS, DOWNLINK, CLIENTS = (10, 1, 100), 50, 100
COMMON = (
    *("dataset.validation=0", "dataset.client_validation=0", "checkpoint.every=0", "track.tensorboard=false"),
    *("baseline=false", "clock=profiles", "client.lr_schedule=constant"),
)
METHODS: dict[str, Sequence[str]] = {
    "fedavg": ("strategy=fedavg", "client.lr=1e-3"),
    "fedfrozen": ("strategy=fedfrozen", "client.lr=1e-3"),
    "lora": ("strategy=fedavg", "adapter=lora", "adapter.rank=8", "adapter.targets=[all]", "client.lr=3e-3"),
}
PACINGS: dict[str, Sequence[str]] = {
    "synchronous": ("participation=0.1",),
    "deadline": ("participation=0.1", "pacing=deadline", "pacing.share=0.8"),
    "buffered": ("pacing=buffered", "pacing.concurrency=10", "pacing.buffer=5"),
}
STEPS = {"synchronous": 1.0, "deadline": 1.25, "buffered": 3.0}  # of the server, for each synchronous round
UPDATES = {"synchronous": 1.0, "deadline": 1.0, "buffered": 0.5}  # of a step, for each of a synchronous round
EVALUATED = {"synchronous": 2, "deadline": 2, "buffered": 4}
WORDS = {
    "cifar10": (
        *("dataset=parquet", "dataset.name=cifar10", "model=vit_cifar", f"num_clients={CLIENTS}"),
        *("partition.alpha=0.3", "dataset.limit=25000", "client.local_epochs=1", "client.batch_size=32"),
        *("client.precision=bf16", "clock.spread=1", "runtime.runner=cohort", "runtime.compile=false"),
    ),
    "quick": (
        *("dataset=digits", "model=vit_tiny", "num_clients=20", "participation=0.5", "partition.alpha=1"),
        *("partition.min_size=4", "dataset.limit=400", "client.local_epochs=1", "client.batch_size=16"),
        *("model.config.hidden_size=32", "model.config.intermediate_size=64", "clock.spread=1"),
    ),
    "nvflare": (
        *("strategy=fedavg", "dataset=parquet", "dataset.name=cifar10", "model=lenet", "num_clients=16"),
        *("partition=iid", "client=sgd", "client.lr=0.001", "client.local_epochs=4", "client.batch_size=4"),
        "runtime.runner=sequential",  # steps of four rows: as quick on a processor's core
    ),
}
# The operations of a device's request in NVFLARE's setting, in billions: LeNet's, as torch counts them, for
# 3,125 images and 4 epochs; and the links at which 62 thousand float32 take half of five seconds each way.
LENET, DEVICES, LINK, SECONDS = 3_204_720 * 3125 * 4 / 1e9, 16, 0.8, (100, 200, 400)
NVFLARE = {
    "synchronous": (),
    "buffered": (
        *("pacing=buffered", "pacing.concurrency=16", "pacing.buffer=1", "pacing.staleness_weight=constant"),
        *("server_optimizer=avgm", "server_optimizer.beta=0", "server_optimizer.lr=0.05"),
    ),
}


@dataclass(frozen=True)
class Cell:
    study: str
    method: str
    pacing: str
    uplink: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.study}-{self.method}-{self.pacing}-{self.uplink:g}mbit-seed{self.seed}"


# Runs ---------------------------------------------------------------------------------------------------


def rounds_of(cell: Cell, options: argparse.Namespace) -> int:
    if cell.study == "nvflare":
        return 10 if cell.pacing == "synchronous" else 10 * DEVICES
    return round(options.rounds * STEPS[cell.pacing])


def words_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    rounds, words = rounds_of(cell, options), [*COMMON, *WORDS[cell.study]]
    words += [f"num_rounds={rounds}", f"seed={cell.seed}", f"device={options.device}"]
    if cell.study != "quick":
        words.append(f"dataset.path={options.cifar10}")
    if cell.study == "nvflare":
        every = 1 if cell.pacing == "synchronous" else DEVICES
        return [*words, *NVFLARE[cell.pacing], f"eval_every={every}"]
    words += [*METHODS[cell.method], *PACINGS[cell.pacing], f"eval_every={EVALUATED[cell.pacing]}"]
    if cell.method == "fedfrozen":
        warmup = round(options.rounds / 2 / UPDATES[cell.pacing])
        words.append(f"strategy.warmup_rounds={warmup}")
    if cell.study == "quick":  # its participation is that of all
        words = [word for word in words if word != "participation=0.1"]
    if cell.pacing == "buffered":
        words = [word for word in words if not word.startswith("participation=")]
    return words


def write_links(cell: Cell, path: Path) -> None:
    """Every client's links; of NVFLARE's devices also their speed. Other speeds are drawn."""
    if cell.study == "nvflare":
        generator = random.Random(cell.seed)
        speeds = [LENET / generator.choice(SECONDS) for _ in range(DEVICES)]
        lines = [f"{client},{LINK},{LINK},{speed!r}" for client, speed in enumerate(speeds)]
        path.write_text("\n".join(["client,uplink,downlink,speed", *lines]) + "\n")
        return
    lines = [f"{client},{cell.uplink:g},{DOWNLINK}" for client in range(CLIENTS)]
    path.write_text("\n".join(["client,uplink,downlink", *lines]) + "\n")


@lru_cache(maxsize=1)
def corpus_for(study: str, options: str) -> Any:
    """Read once in a process, while its cells are of one study."""
    from fedfrozen_app.config import compose_run
    from fedfrozen_app.data.federated import load_corpus

    words = words_for(Cell(study, "fedavg", "synchronous", 10, 0), argparse.Namespace(**json.loads(options)))
    return load_corpus(compose_run(words).config)


def run_cell(cell: Cell, options_text: str) -> dict[str, Any]:
    """Train and evaluate, in a worker process."""
    import torch

    from fedfrozen_app.config import compose_run
    from fedfrozen_app.run.job import Job
    from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

    logging.getLogger("fedfrozen_app").setLevel(logging.ERROR)
    options = argparse.Namespace(**json.loads(options_text))
    torch.set_num_threads(options.threads)
    corpus, silent = corpus_for(cell.study, options_text), io.StringIO()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(silent), redirect_stderr(silent):
        links, out = Path(folder) / "links.csv", Path(folder) / "run"
        write_links(cell, links)
        words = [*words_for(cell, options), f"clock.file={links}"]
        summary = run_in_process(Job(compose_run(words), out), corpus=corpus)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    return {
        "kind": "run",
        "cell": asdict(cell),
        "rounds": rounds_of(cell, options),
        **measured(rows, keep_parts=cell.pacing == "synchronous"),
        "bytes_up": summary["total_bytes_up"],
        "bytes_down": summary["total_bytes_down"],
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "commit": known_commit(),
    }


def measured(rows: Sequence[dict[str, Any]], *, keep_parts: bool) -> dict[str, Any]:
    """What a run's rows say of its course. `parts`: seconds by round and client of download, training and
    upload, from which other links' times follow."""
    trained = [row for row in rows if row["round"]]
    evaluated = [row for row in rows if "test_accuracy" in row]
    found: dict[str, Any] = {
        "score": evaluated[-1]["test_accuracy"],
        "curve": [
            [row["round"], round(row["virtual_seconds"], 3), row["test_accuracy"]] for row in evaluated
        ],
        "virtual_seconds": trained[-1]["virtual_seconds"],
        "round_bytes_up": [row["bytes_up"] for row in trained],
        "replies": sum(len(row["clients"]) for row in trained),
        "failed": sum(row.get("clients_failed", 0) for row in trained),
        "dropped": sum(row.get("clients_dropped", 0) for row in trained),
        "staleness": [round(row["staleness_mean"], 3) for row in trained if "staleness_mean" in row],
        "staleness_max": max((row.get("staleness_max", 0) for row in trained), default=0),
    }
    if keep_parts:
        parts = [[times[1:] for times in row["virtual_by_client"].values()] for row in trained]
        found["parts"] = [[[round(one, 3) for one in times] for times in row] for row in parts]
    return found


def wanted(options: argparse.Namespace) -> list[Cell]:
    """By seed, so that what is done when time is up has all pacings of the first seeds; the study first."""
    study, seeds = "quick" if options.quick else "cifar10", range(options.seeds)
    cells: list[Cell] = [Cell(study, m, p, 10, s) for s, m, p in itertools.product(seeds, METHODS, PACINGS)]
    cells += itertools.chain.from_iterable(further(study, seed) for seed in seeds)
    if not options.quick:
        cells += [Cell("nvflare", "fedavg", pacing, LINK, seed) for seed in range(3) for pacing in NVFLARE]
    return [one for one in cells if not options.cells or any(words in one.name for words in options.cells)]


def further(study: str, seed: int) -> Iterator[Cell]:
    """Buffered at the other links."""
    for uplink, method in itertools.product(UPLINKS[1:], METHODS):
        yield Cell(study, method, "buffered", uplink, seed)


def run_all(options: argparse.Namespace) -> list[str]:
    def missing() -> list[Cell]:
        rows = [row for row in read_lines(options.out) if row.get("kind") == "run"]
        done = {(Cell(**row["cell"]), row["rounds"]) for row in rows}
        return [one for one in wanted(options) if (one, rounds_of(one, options)) not in done]

    print(f"{len(missing())} of {len(wanted(options))} runs are missing.", flush=True)
    text = json.dumps(vars(options), default=str)
    places = {"out": options.out, "workers": options.workers, "minutes": options.minutes}
    return run_missing(missing, run_cell, text, **places)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "show"))
    parser.add_argument("--out", type=Path, required=True, help="a row for each run is appended to this file")
    parser.add_argument("--cifar10", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("--quick", action="store_true", help="digits, ten rounds")
    parser.add_argument("--cells", nargs="+", help="those whose name holds one of these words")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100, help="of synchronous runs; the others' follow")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.what == "runs" and not (options.quick or options.cifar10):
        parser.error("give --cifar10 DIR, or --quick")
    if options.quick and options.rounds == parser.get_default("rounds"):
        options.rounds = 10
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.what == "show":
        show_all(read_lines(options.out))
        return
    require_commit()
    if problems := run_all(options):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
