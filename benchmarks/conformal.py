"""Whether prediction sets cover what they state: 20 drawn splits of rows that training did not see.

Design, written before the first run. FedAvg over ten clients, labels dealt by Dirichlet(0.1), on

    digits     scikit-learn's, with the default ViT
    cifar10    CIFAR-10, 10,000 train rows, NIID-Bench's LeNet
    mtsamples  clinical notes of 12 specialties, a small BERT from scratch

Clients hold half of their rows out (dataset.client_validation=0.5). The model is trained once. Then, 20
times, all rows that were held out are dealt at random into two halves: one calibrates (`fedfrozen
calibrate`'s own rule: a third of each client's rows for the temperature, the rest for the threshold), the
other is predicted. Stated coverage: 90 %.

Outcome: the mean over the splits of the share of rows covered, all clients' rows together; it should lie
within 89 and 91 %. By client it is shown as it is: nothing is promised there. Beside it, of every split:
the rule of all calibration rows in one place, computed by other code (scipy's root finder, a sort), and the
federated rule under the masks of secure aggregation.

    python benchmarks/conformal.py train digits --work DIR
    python benchmarks/conformal.py train cifar10 --data DIR --work DIR
    python benchmarks/conformal.py split digits --work DIR       appends to benchmarks/results/conformal.jsonl
    python benchmarks/conformal.py show

`train` keeps the run in DIR/digits. `score digits --run RUN --work DIR` takes a finished run in its place, as
one that `fedfrozen reproduce` has run again, and `split --rows FILE` writes elsewhere.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from cells import read
from common import RESULTS
from conformal_results import DATA, NAME, Conformal
from provenance import require_commit
from scipy.optimize import brentq
from scipy.special import softmax

from fedfrozen_app.calibration.calibrate import rule_of
from fedfrozen_app.calibration.calibration_rows import Part, parts_of
from fedfrozen_app.calibration.masked_sum import MaskedSum
from fedfrozen_app.calibration.sets import Rule
from fedfrozen_app.calibration.temperature import part_of
from fedfrozen_app.config import SecureAggregationConfig, compose_run
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.files import status
from fedfrozen_app.files.append import append
from fedfrozen_app.launch import finished, load_run
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

FILE = RESULTS / NAME
COVERAGE, SPLITS, FOR_TEMPERATURE = 0.9, 20, 1 / 3
EVERY = [
    *("strategy=fedavg", "num_clients=10", "partition=dirichlet", "partition.alpha=0.1", "seed=0"),
    *("dataset.client_validation=0.5", "baseline=false", "device=cpu", "runtime.threads=1"),
    *("track.tensorboard=false", "checkpoint.every=0", "partition.min_size=8"),
]
WORDS = {
    "digits": ["num_rounds=20", "eval_every=20"],
    "cifar10": [
        *("dataset=parquet", "dataset.name=cifar10", "dataset.limit=10000", "model=lenet", "num_rounds=8"),
        *("client.lr=1e-3", "client.local_epochs=1", "eval_every=8"),
    ],
    "mtsamples": [
        *("dataset=mtsamples", "dataset.max_tokens=128", "model=bert_small", "client.lr=3e-3"),
        *("num_rounds=10", "eval_every=10", "partition.min_size=4"),
    ],
}
MASKS = SecureAggregationConfig(name="on", min_cohort=3)


def train(name: str, data: Path | None, work: Path) -> None:
    """The run, and its scores."""
    require_commit()
    path = [] if data is None else [f"dataset.path={data.resolve()}"]
    composed = compose_run([*EVERY, *WORDS[name], *path])
    with status.recorded(work / name, composed.resolved, composed.overrides):
        run_in_process(Job(composed, work / name, None))
    score(name, work / name, work)


def score(name: str, run: Path, work: Path) -> None:
    """The scores of all rows that the clients of a finished run hold out, by client."""
    summary = finished(run)
    parts = parts_of(load_run(run, [], trusted=True), "clients")
    about = {
        "accuracy": summary["final_test_accuracy"],
        "commit": require_commit(),
        "seconds": summary["seconds"],
    }
    np.savez(
        work / f"{name}.npz",
        logits=np.concatenate([part.logits for part in parts]),
        labels=np.concatenate([part.labels for part in parts]).astype(np.int64),
        clients=np.concatenate([np.full(len(part.labels), int(part.name)) for part in parts]),
        about=np.array(json.dumps(about)),
    )


def split(name: str, work: Path, rows: Path = FILE) -> None:
    found = np.load(work / f"{name}.npz")
    about = json.loads(str(found["about"])) | {"data": name, "measured": require_commit()}
    held = found["logits"], found["labels"], found["clients"]
    done = {row["split"] for row in read(rows) if row["data"] == name}
    for number in sorted(set(range(SPLITS)) - done):
        append(rows, json.dumps({**about, "split": number, **measured(*held, number)}))


def measured(logits: Any, labels: Any, clients: Any, number: int) -> dict[str, Any]:
    generator = numpy_generator(0, "conformal split", number)
    order = generator.permutation(len(labels))
    known, rest = order[: len(order) // 2], order[len(order) // 2 :]
    parts = []
    for client in np.unique(clients):
        rows = known[clients[known] == client]
        first = np.zeros(len(rows), dtype=bool)
        first[: round(len(rows) * FOR_TEMPERATURE)] = True
        parts.append(Part(str(client), logits[rows], labels[rows], first))
    rule = rule_of(parts, COVERAGE, classes=True)
    masks = MaskedSum([part.name for part in parts], MASKS)
    masked, central = rule_of(parts, COVERAGE, classes=True, masked=masks), in_one_place(parts)
    covered = rule.scores(logits[rest], labels[rest]) <= rule.threshold
    by_client = {
        str(client): [int((clients[rest] == client).sum()), int(covered[clients[rest] == client].sum())]
        for client in np.unique(clients)
    }
    return {
        "calibration_rows": len(known),
        "rows": len(rest),
        "covered": int(covered.sum()),
        "size": float(rule.sizes(logits[rest]).mean()),
        "temperature": rule.temperature,
        "threshold": rule.threshold,
        "clients": by_client,
        "central": differences(rule, central),
        "masked": differences(rule, masked) | {"sums": masks.done, "rounding": masks.rounding},
    }


def differences(one: Rule, other: Rule) -> dict[str, float]:
    assert one.temperature is not None and other.temperature is not None
    return {
        "temperature": abs(one.temperature - other.temperature),
        "threshold": abs(one.threshold - other.threshold),
    }


def in_one_place(parts: list[Part]) -> Rule:
    """Of all calibration rows together, by a root finder and a sort."""
    logits = np.concatenate([part.logits for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    first = np.concatenate([part.first for part in parts])
    slope = part_of(logits[first], labels[first])
    beta = brentq(lambda value: float(slope(value)[0]), 0.05, 20, xtol=1e-15, rtol=8.9e-16, maxiter=500)
    shares = softmax(logits[~first] / (1 / beta), axis=1)
    scores = np.sort(1 - shares[np.arange(len(shares)), labels[~first]])
    rank = int(np.ceil((len(scores) + 1) * COVERAGE - 1e-9))
    return Rule(COVERAGE, float(scores[rank - 1]), float(1 / beta))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("train", "score", "split"):
        verb = verbs.add_parser(name)
        verb.add_argument("name", choices=DATA)
        verb.add_argument("--work", type=Path, required=True)
        if name == "train":
            verb.add_argument("--data", type=Path)
        elif name == "score":
            verb.add_argument("--run", type=Path, required=True)
        else:
            verb.add_argument("--rows", type=Path, default=FILE)
    verbs.add_parser("show")
    given = parser.parse_args()
    if given.verb in ("train", "score"):
        given.work.mkdir(parents=True, exist_ok=True)
    if given.verb == "train":
        train(given.name, given.data, given.work.resolve())
    elif given.verb == "score":
        score(given.name, given.run, given.work)
    elif given.verb == "split":
        split(given.name, given.work, given.rows)
    else:
        print(Conformal(RESULTS).overview())


if __name__ == "__main__":
    main()
