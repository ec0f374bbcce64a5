"""Noise at each site against noise in the sum, at the same epsilon for each example: what accuracy is left.

`digits` (a linear model, minutes) or `mtsamples` (the head of a pretrained encoder: hours, or a GPU).
Both sides are private per example at the same epsilon and delta. `site` takes local steps with all its noise
on each; `sum` takes one step a round, a share of the noise at each site, the server's Adam after it. Rates
are the best of a few, tried on seed 100, whose run is not counted. A run that is there is not run again.
"""

import argparse
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

from common import RESULTS, show, spread, write_result

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.inprocess.runtime import run_in_process
from fedfrozen_app.run.job import Job

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
    },
    "mtsamples": {
        "common": (
            *("strategy=safl", "strategy.select=none", "dataset=mtsamples", "dataset.path={data}"),
            *("model=checkpoint", "model.path={model}", "num_clients=10", "num_rounds=40"),
        ),
        "site": ("client.head_lr={rate}", "client.batch_size=64"),
        "rates": {"site": (0.03, 0.1, 0.3), "sum": (0.03, 0.1, 0.3)},
    },
}


def words_for(options: argparse.Namespace, where: str, epsilon: float, rate: float, seed: int) -> list[str]:
    task = TASKS[options.task]
    words = [str(word) for word in task["common"]]
    if where == "none":
        words += [str(word) for word in task["site"]]
    else:
        words += ["privacy=dp_sgd", f"privacy.epsilon={epsilon:g}", "privacy.delta=1e-5"]
        words += (*SUM, "server_optimizer.lr={rate}") if where == "sum" else task["site"]
    words += [f"seed={seed}", "checkpoint.every=0", "track.tensorboard=false", "eval_every=5"]
    return [word.format(data=options.data, model=options.model, rate=rate) for word in words]


def final(options: argparse.Namespace, where: str, epsilon: float, rate: float, seed: int) -> float:
    """The last test figure of a run, which is trained if it is not there."""
    folder = options.folder / options.task / f"{where}-{epsilon:g}-{rate:g}-{seed}"
    if not (folder / "summary.json").exists():
        words = [*words_for(options, where, epsilon, rate, seed), "overwrite=true"]
        config = resolved(compose_config(words))
        with redirect_stdout(io.StringIO()):
            run_in_process(Job(read(config), config, words, folder, shown=False))
    summary = json.loads((folder / "summary.json").read_text())
    return summary.get("final_test_f1", summary.get("final_test_accuracy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--data", default="", help="the folder of MTSamples")
    parser.add_argument("--model", default="", help="the folder of a pretrained encoder")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 2.0])
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/noise_in_sum"), help="where runs are kept"
    )
    options = parser.parse_args()
    rates = TASKS[options.task]["rates"]
    found: dict[str, dict] = {}
    for where, epsilon in [("none", 0.0), *((w, e) for e in options.epsilons for w in ("site", "sum"))]:
        tried = {
            rate: final(options, where, epsilon, rate, TRIED) for rate in rates.get(where, rates["site"])
        }
        best = max(tried, key=tried.__getitem__)
        figures = [final(options, where, epsilon, best, seed) for seed in SEEDS]
        found[f"{where}, epsilon {epsilon:g}"] = {"tried": tried, "rate": best, "figures": figures}
        path = RESULTS / f"noise_in_sum_{options.task}.json"
        write_result("noise_in_sum", {"task": options.task, "runs": found}, path)
    rows = [[name, f"{one['rate']:g}", f"{spread(one['figures']):.3f}"] for name, one in found.items()]
    show(f"{options.task}: the last test figure, 3 seeds", ["noise", "rate", "figure"], rows, {}, path)


if __name__ == "__main__":
    main()
