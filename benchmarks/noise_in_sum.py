"""Noise at each site against noise in the sum, at the same epsilon for each example: what accuracy is left.

    python benchmarks/noise_in_sum.py                                            (digits, a linear model)
    python benchmarks/noise_in_sum.py --task mtsamples --data DIR --model DIR    (a pretrained encoder's head)

Both sides are private per example at the same epsilon and delta. `site` takes local steps with all its noise
on each; `sum` takes one step a round, a share of the noise at each site, the server's Adam after it. Rates
are the best of a few on the validation rows of seed 100, whose run is not counted. A run that is there is not
run again, so that a second command goes on where the first was stopped. With `--only`, what an earlier
command found of the other ways stays in the result, with its commit.

`noise_in_sum_mtsamples_before.json` has `sum` as it was at commit c501ea8: each client sized its share for
its own participations and for the threshold, and counted no colluders. What is compared, fixed before these
runs: at epsilon 8 and 2, macro F1 on the test rows of the last model, of each seed and their mean, and of
these what one sigma for the run costs (after less before). Data, encoder, rates and seeds are the same on
both sides; each side takes its own best rate on seed 100. No rate and no seed is added after a look at the
test rows; with three seeds no test of significance is made.

Of MTSamples a linear head alone trains, on the mean of a frozen encoder's outputs over a note's tokens,
scaled to length 1. That never changes: it is computed once, without dropout.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, show, spread, write_result
from kept_runs import last_rows
from provenance import require_commit
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from torch.nn.functional import normalize

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.local.worker import Worker

SEEDS, TRIED = (0, 1, 2), 100
SIDE = 8  # of the picture that a row becomes
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
        "common": ("strategy=fedavg", "model=linear", "num_clients=10", "num_rounds=30"),
        "site": ("client.lr={rate}", "client.batch_size=64"),
        "rates": {"site": (0.03, 0.1, 0.3, 1.0, 3.0), "sum": (0.01, 0.03, 0.1, 0.3, 1.0)},
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
    return [word.format(rate=rate) for word in words]


def read_by_encoder(options: argparse.Namespace) -> Corpus:
    """The notes as the head reads them. A row becomes a picture, which the linear model takes."""
    words = ["dataset=mtsamples", f"dataset.path={options.data}", "dataset.max_tokens=128"]
    words += ["strategy=fedavg", "model=checkpoint", f"model.path={options.model}", "num_clients=10"]
    config = read(resolved(compose_config([*words, f"device={options.device}"])))
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))

    @torch.no_grad()
    def features(table: Table) -> Table:
        found = []
        for index in torch.arange(len(table)).split(64):
            inputs = {key: value[index].to(worker.device) for key, value in table.inputs.items()}
            told = worker.model.base_model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(2)
            found.append(normalize((told * mask).sum(dim=1) / mask.sum(dim=1), dim=1).cpu())
        pixels = torch.cat(found).view(len(table), -1, SIDE, SIDE)
        return Table({"pixel_values": pixels}, table.labels)

    train, test = features(corpus.train), features(corpus.test)
    channels = train.inputs["pixel_values"].shape[1]
    as_they_are = {"mean": (0.0,) * channels, "std": (1 / 255,) * channels}  # pixels are divided by 255
    return replace(corpus, task="image", train=train, test=test, vocab_size=0, **as_they_are)


def finals(
    options: argparse.Namespace, runs: Sequence[Run], corpus: Corpus | None
) -> dict[Run, tuple[float, float]]:
    """Of each its accuracy on the validation rows at the end, and its figure on the test rows."""
    folders = [options.folder / options.task / "-".join(f"{word}" for word in run) for run in runs]
    words = [words_for(options, *run) for run in runs]
    rows = last_rows(list(zip(folders, words, strict=True)), options.workers, corpus)
    return {
        run: (row["val_accuracy"], row["test_accuracy"] if corpus is None else macro_f1(folder, corpus.test))
        for run, folder, row in zip(runs, folders, rows, strict=True)
    }


def kept(path: Path, only: Sequence[str]) -> dict[str, Any]:
    """What an earlier command found of the other ways."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    runs = {name: run for name, run in earlier["runs"].items() if name.partition(",")[0] not in only}
    return {name: {"commit": earlier["commit"], **run} for name, run in runs.items()}


def macro_f1(folder: Path, rows: Table) -> float:
    """Of the run's last model, which is linear: an app's run on pictures tells accuracy alone."""
    model = load_file(folder / "model.safetensors")
    pixels = rows.inputs["pixel_values"].flatten(1)
    predicted = (pixels @ model["classifier.weight"].T + model["classifier.bias"]).argmax(dim=1)
    return float(f1_score(rows.labels, predicted, average="macro"))


def main() -> None:
    commit = require_commit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--data", default="", help="the folder of MTSamples")
    parser.add_argument("--model", default="", help="the folder of a pretrained encoder")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 2.0])
    every = ("none", "site", "sum")
    parser.add_argument("--only", choices=every, nargs="+", default=every, help="where the noise is")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/noise_in_sum"), help="where runs are kept"
    )
    options = parser.parse_args()
    rates = TASKS[options.task]["rates"]
    ways = [("none", 0.0), *itertools.product(("site", "sum"), options.epsilons)]
    ways = [way for way in ways if way[0] in options.only]
    tried = {way: [(*way, rate, TRIED) for rate in rates.get(way[0], rates["site"])] for way in ways}
    corpus = read_by_encoder(options) if options.task == "mtsamples" else None
    seen = finals(options, [run for runs in tried.values() for run in runs], corpus)
    best = {way: max(runs, key=lambda run: seen[run][0]) for way, runs in tried.items()}
    seen |= finals(options, [(*run[:3], seed) for seed in SEEDS for run in best.values()], corpus)
    path = RESULTS / f"noise_in_sum_{options.task}.json"
    found = kept(path, options.only)
    for (where, epsilon), run in best.items():
        found[f"{where}, epsilon {epsilon:g}"] = {
            "tried": {one[2]: seen[one][0] for one in tried[where, epsilon]},
            "rate": run[2],
            "figures": [seen[(*run[:3], seed)][1] for seed in SEEDS],
            "commit": commit,
        }
    write_result("noise_in_sum", {"task": options.task, "runs": found}, path)
    rows = [[name, f"{one['rate']:g}", f"{spread(one['figures']):.3f}"] for name, one in found.items()]
    what = "accuracy" if corpus is None else "macro F1"
    show(f"{options.task}: {what} on the test rows, 3 seeds", ["noise", "rate", what], rows, {}, path)


if __name__ == "__main__":
    main()
