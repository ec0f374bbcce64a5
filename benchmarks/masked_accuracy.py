"""Accuracy with masks and without: the same runs with secure_aggregation=on and off, over three seeds.

    python benchmarks/masked_accuracy.py                    the default run on the built-in digits
    python benchmarks/masked_accuracy.py --cifar10 DIR      a small ViT on CIFAR-10 too (a GPU)

FedFrozen across its switch, ten clients, Dirichlet 0.3. Masks round updates to whole numbers; this is what
that does to the model that comes out. A run that is there is not run again.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from common import show, spread, write_result
from kept_runs import last_rows

MOST = 0.2  # points
WAYS = ("off", "on")
COMMON = (
    *("strategy=fedfrozen", "partition.alpha=0.3", "num_clients=10"),
    *("checkpoint.every=0", "track.tensorboard=false", "dataset.client_validation=0"),
)
CIFAR10 = (
    *("dataset=parquet", "dataset.name=cifar10", "model=vit_cifar", "num_rounds=20", "client.batch_size=64"),
    *("client.local_epochs=1", "eval_every=20", "runtime.compile=false"),
)


def tasks(options: argparse.Namespace) -> dict[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {"digits": ("device=cpu",)}
    if options.cifar10:
        found["cifar10"] = (*CIFAR10, f"dataset.path={options.cifar10}", f"device={options.device}")
    return {name: words for name, words in found.items() if name in (options.only or found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--only", nargs="+", choices=("digits", "cifar10"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto", help="for CIFAR-10")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/masked_accuracy"), help="where runs are kept"
    )
    parser.add_argument("--out", type=Path, help="file of the result; default: benchmarks/results")
    options = parser.parse_args()
    seeds = range(options.seeds)
    names = list(itertools.product(tasks(options), seeds, WAYS))
    runs = [
        (
            options.folder / f"{task}-{seed}-{way}",
            [*COMMON, *tasks(options)[task], f"seed={seed}", f"secure_aggregation={way}"],
        )
        for task, seed, way in names
    ]
    scores = {
        name: 100 * row["test_accuracy"]
        for name, row in zip(names, last_rows(runs, options.workers), strict=True)
    }
    found, lines, checks = {}, [], {}
    for task in tasks(options):
        by_way = {way: [scores[task, seed, way] for seed in seeds] for way in WAYS}
        gaps = [on - off for off, on in zip(by_way["off"], by_way["on"], strict=True)]
        found[task] = by_way | {"gaps": gaps}
        mean = sum(gaps) / len(gaps)
        told = [f"{spread(by_way[way]):.2f}" for way in WAYS]
        lines.append([task, *told, f"{mean:+.2f} ({', '.join(f'{gap:+.2f}' for gap in gaps)})"])
        checks[f"{task}: within {MOST} points on average"] = abs(mean) <= MOST
    path = write_result("masked_accuracy", found, options.out)
    show(
        f"Test accuracy, %, {options.seeds} seeds",
        ["", "plain", "masked", "masked - plain, points"],
        lines,
        checks,
        path,
    )


if __name__ == "__main__":
    main()
