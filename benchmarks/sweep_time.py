"""A sweep in one process against its runs one by one: seconds of the clock.

    python benchmarks/sweep_time.py --data DIR                          (CIFAR-10, on a GPU)
    python benchmarks/sweep_time.py --device cpu --tiny --seeds 0 1     (digits, to see it work)

Three strategies, two alphas and five seeds: `fedfrozen -m` as anybody gives it, which shares data, model and
recorded steps, and trains runs of one shape beside one another. Beside it one run of each strategy in a
process of its own (--alone picks some), compiled from the start as every run once was, and with the default;
30 of them would take their mean times 30, which is said and not measured. `training` is what the rows of all
runs say of local work and aggregation: what would be left if nothing else took time.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from common import arguments, show, write_result

STRATEGIES, ALPHAS = ("fedavg", "fedprox", "fedfrozen"), (0.1, 0.5)
LEAST = 4  # times quicker than runs one by one, compiled


def words_for(options: Any) -> list[str]:
    words = [f"device={options.device}", f"num_rounds={options.rounds}", f"eval_every={options.rounds}"]
    if options.tiny:
        return [*words, "dataset.limit=300", "num_clients=3", "client.local_steps=2", "partition.min_size=4"]
    words += ["dataset=parquet", "dataset.name=cifar10", f"dataset.path={Path(options.data).resolve()}"]
    words += ["model=vit_cifar", "num_clients=10", "client.batch_size=64", "client.local_steps=25"]
    return [*words, "client.precision=bf16", "client.lr=1e-3", "checkpoint.every=0"]


def timed(words: Sequence[str]) -> tuple[float, list[float]]:
    """Seconds of the clock of a command in a folder of its own, and each run's seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-m", "fedfrozen_app", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        files = sorted(Path(folder).glob("**/metrics.jsonl"))
        return wall, [training(path) for path in files]


def training(path: Path) -> float:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sum(row["seconds"].get(part, 0.0) for row in rows for part in ("train", "aggregate"))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], repeats=1)
    parser.add_argument("--data", help="folder with train.parquet and test.parquet of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--alone", nargs="+", default=STRATEGIES, choices=STRATEGIES, help="runs one by one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="digits and three clients, to see it work")
    parser.add_argument("--out", type=Path, help="the result file, in place of results/sweep_time.json")
    options = parser.parse_args()
    words = words_for(options)
    count = len(STRATEGIES) * len(ALPHAS) * len(options.seeds)
    swept = [f"strategy={','.join(STRATEGIES)}", f"partition.alpha={','.join(map(str, ALPHAS))}"]
    wall, each = timed(["-m", *swept, f"seed={','.join(map(str, options.seeds))}", *words])
    if len(each) != count:
        raise SystemExit(f"The sweep has {len(each)} runs and not {count}.")
    print(f"the sweep: {wall:.0f} s, training {sum(each):.0f} s", flush=True)
    alone: dict[str, list[float]] = {}
    for wish, strategy in product(("auto", "true"), options.alone):
        own = [f"strategy={strategy}", f"partition.alpha={ALPHAS[0]}", "seed=0", f"runtime.compile={wish}"]
        seconds, _ = timed([*own, *words])
        alone.setdefault(wish, []).append(seconds)
        print(f"{strategy} by itself, compile={wish}: {seconds:.1f} s", flush=True)
    reckoned = {wish: count * fmean(seconds) for wish, seconds in alone.items()}
    figures = {
        "runs": count,
        "sweep_seconds": wall,
        "training_seconds": each,
        "alone_seconds": alone,
        "reckoned_seconds": reckoned,
    }
    path = write_result("sweep_time", figures, options.out)
    rows = [
        ["one process", f"{wall:.0f}", "1"],
        ["its rows' training, added up", f"{sum(each):.0f}", f"{sum(each) / wall:.2f}"],
        *(
            [f"one by one, compile={wish} (reckoned)", f"{seconds:.0f}", f"{seconds / wall:.1f}"]
            for wish, seconds in reckoned.items()
        ),
    ]
    checks = {f"at least {LEAST} times quicker than one by one, compiled": reckoned["true"] >= LEAST * wall}
    show(f"A sweep of {count} runs", ("", "seconds", "times the sweep"), rows, checks, path)


if __name__ == "__main__":
    main()
