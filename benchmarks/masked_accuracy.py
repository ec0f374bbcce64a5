"""Accuracy with masks and without: the same runs with secure_aggregation=on and off, over three seeds.

    python benchmarks/masked_accuracy.py                    the built-in digits
    python benchmarks/masked_accuracy.py --cifar10 DIR      a small ViT on CIFAR-10 too (a GPU)

FedFrozen across its switch, ten clients. Masks round updates to whole numbers; this is what that does to the
model that comes out. Training blows the smallest difference up, the more so the more clients differ, and
AdamW far more than SGD: `other runner` is the plain run by the other runner, which differs from `plain` in
the last bits of float32 alone, and shows how far two runs are apart that mean the same. A run that is there
is not run again, and what an earlier command found of another task stays in the result.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from cells import paired
from common import RESULTS, about, show, spread, write_result
from kept_runs import last_rows
from provenance import require_commit

MOST = 0.2  # points
COMMON = (
    *("strategy=fedfrozen", "num_clients=10"),
    *("checkpoint.every=0", "track.tensorboard=false", "dataset.client_validation=0"),
)
SGD = ("client=sgd", "client.lr=0.03")
CIFAR10 = (
    *("dataset=parquet", "dataset.name=cifar10", "model=vit_cifar", "num_rounds=20", "client.batch_size=64"),
    *("client.local_epochs=1", "eval_every=20", "runtime.compile=false", "dataset.limit=10000"),
)


WAYS = {
    "plain": ("runtime.runner=sequential",),
    "masked": ("runtime.runner=sequential", "secure_aggregation=on"),
    "other runner": ("runtime.runner=cohort",),
}


def tasks(options: argparse.Namespace) -> dict[str, Sequence[str]]:
    """The first of each data set is held against the goal, the others are shown."""
    plain = ("device=cpu", "model=vit_tiny")
    digits = (*plain, "model.config.patch_size=4", *SGD)
    cifar = (*CIFAR10, f"dataset.path={options.cifar10}", f"device={options.device}", "partition.alpha=0.3")
    found: dict[str, Sequence[str]] = {
        "digits": (*digits, "partition.alpha=1"),
        "digits, skewed": (*digits, "partition.alpha=0.3"),
        "digits, skewed, AdamW": (*plain, "partition.alpha=0.3"),
    }
    if options.cifar10:
        found |= {"cifar10": (*cifar, *SGD), "cifar10, AdamW": cifar}
    return {name: words for name, words in found.items() if name in (options.only or found)}


def main() -> None:
    require_commit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--only", nargs="+", help="some of the tasks, by name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-other", action="store_true", help="without the other runner, which is slow")
    parser.add_argument("--device", default="auto", help="for CIFAR-10")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/masked_accuracy"), help="where runs are kept"
    )
    parser.add_argument("--out", type=Path, help="file of the result; default: benchmarks/results")
    options = parser.parse_args()
    seeds, known = range(options.seeds), tasks(options)
    names = [
        (task, way, seed)
        for task, seed in itertools.product(known, seeds)
        for way in WAYS
        if not (options.no_other and way == "other runner")
    ]
    runs = [
        (
            options.folder / f"{task}-{seed}-{way}".replace(", ", "-").replace(" ", "-"),
            [*COMMON, *known[task], f"seed={seed}", *WAYS[way]],
        )
        for task, way, seed in names
    ]
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for (task, way, seed), row in zip(names, last_rows(runs, options.workers), strict=True):
        scores.setdefault(task, {}).setdefault(way, {})[seed] = 100 * row["test_accuracy"]
    path = options.out or RESULTS / "masked_accuracy.json"
    found = json.loads(path.read_text())["tasks"] if path.exists() else {}
    lines, checks = [], {}
    for task, by_way in scores.items():
        gaps = {way: paired(own, by_way["plain"]) for way, own in by_way.items() if way != "plain"}
        found[task] = {"accuracies": by_way, "over_plain": gaps, "about": about()}
        for way, own in by_way.items():
            gap = gaps.get(way)
            text = "" if gap is None else f"{gap.mean:+.2f} ± {gap.half:.2f}"
            lines.append([task, way, f"{spread(list(own.values())):.2f}", text])
        if "," not in task:
            checks[f"{task}: masked within {MOST} points of plain on average"] = (
                abs(gaps["masked"].mean) <= MOST
            )
    path = write_result("masked_accuracy", {"tasks": found}, path)
    heads = ["", "", "test accuracy, %", "over plain, points"]
    show(f"With masks and without, {options.seeds} seeds", heads, lines, checks, path)


if __name__ == "__main__":
    main()
