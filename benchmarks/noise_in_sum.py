"""Noise at each site against noise in the sum, at the same epsilon for each example: what accuracy is left.

`digits` (a linear model, minutes) or `mtsamples` (the head of a pretrained encoder: hours, or a GPU).
Both sides are private per example at the same epsilon and delta. `site` takes local steps with all its noise
on each; `sum` takes one step a round, a share of the noise at each site, the server's Adam after it. Rates
are the best of a few on the validation rows of seed 100, whose run is not counted. A run that is there is not
run again, so that a second command goes on where the first was stopped.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, show, spread, write_result
from kept_runs import last_rows

SEEDS, TRIED = (0, 1, 2), 100
SUM = (
    *("secure_aggregation=on", "secure_aggregation.noise=sum", "secure_aggregation.max_examples=1000"),
    *("client.optimizer=sgd", "client.lr=1", "client.lr_schedule=constant", "client.weight_decay=0"),
    "server_optimizer=adam",
)
TASKS = {
    "digits": {
        "common": ("strategy=fedavg", "model=linear", "num_clients=10", "num_rounds=40"),
        "site": ("client.lr={rate}", "client.batch_size=64"),
        "rates": {"site": (0.01, 0.03, 0.1), "sum": (0.01, 0.03, 0.1)},
        "score": "accuracy",
    },
    "mtsamples": {
        "common": (
            *("strategy=safl", "strategy.select=none", "dataset=mtsamples", "dataset.path={data}"),
            *("model=checkpoint", "model.path={model}", "num_clients=10", "num_rounds=30"),
            "dataset.max_tokens=128",
        ),
        "site": ("client.head_lr={rate}", "client.batch_size=64"),
        "rates": {"site": (0.03, 0.1, 0.3), "sum": (0.03, 0.1, 0.3)},
        "score": "f1_macro",
    },
}


Run = tuple[str, float, float, int]  # where the noise is, epsilon, rate, seed


def words_for(options: argparse.Namespace, where: str, epsilon: float, rate: float, seed: int) -> list[str]:
    task = TASKS[options.task]
    words = [str(word) for word in task["common"]]
    if where == "none":
        words += [str(word) for word in task["site"]]
    else:
        words += ["privacy=dp_sgd", f"privacy.epsilon={epsilon:g}", "privacy.delta=1e-5"]
        words += (*SUM, "server_optimizer.lr={rate}") if where == "sum" else task["site"]
    words += [
        f"device={options.device}",
        f"seed={seed}",
        "checkpoint.every=0",
        "track.tensorboard=false",
        "eval_every=10",
    ]
    return [word.format(data=options.data, model=options.model, rate=rate) for word in words]


def finals(options: argparse.Namespace, runs: Sequence[Run]) -> dict[Run, tuple[float, float]]:
    """The last figures of each on validation and on test rows."""
    score = TASKS[options.task]["score"]
    folders = [options.folder / options.task / "-".join(f"{word}" for word in run) for run in runs]
    words = [words_for(options, *run) for run in runs]
    rows = last_rows(list(zip(folders, words, strict=True)), options.workers)
    return {run: (row[f"val_{score}"], row[f"test_{score}"]) for run, row in zip(runs, rows, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--data", default="", help="the folder of MTSamples")
    parser.add_argument("--model", default="", help="the folder of a pretrained encoder")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 2.0])
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/noise_in_sum"), help="where runs are kept"
    )
    options = parser.parse_args()
    rates = TASKS[options.task]["rates"]
    ways = [("none", 0.0), *itertools.product(("site", "sum"), options.epsilons)]
    tried = {way: [(*way, rate, TRIED) for rate in rates.get(way[0], rates["site"])] for way in ways}
    seen = finals(options, [run for runs in tried.values() for run in runs])
    best = {way: max(runs, key=lambda run: seen[run][0]) for way, runs in tried.items()}
    seen |= finals(options, [(*run[:3], seed) for seed in SEEDS for run in best.values()])
    found = {}
    for (where, epsilon), run in best.items():
        found[f"{where}, epsilon {epsilon:g}"] = {
            "tried": {one[2]: seen[one][0] for one in tried[where, epsilon]},
            "rate": run[2],
            "figures": [seen[(*run[:3], seed)][1] for seed in SEEDS],
        }
    path = RESULTS / f"noise_in_sum_{options.task}.json"
    write_result("noise_in_sum", {"task": options.task, "runs": found}, path)
    rows = [[name, f"{one['rate']:g}", f"{spread(one['figures']):.3f}"] for name, one in found.items()]
    show(f"{options.task}: the last test figure, 3 seeds", ["noise", "rate", "figure"], rows, {}, path)


if __name__ == "__main__":
    main()
