"""Our runs on TCGA-BRCA against a plain torch loop with the same first weights and the same batches.

What differs then is our code alone, or the order of people with equal times, which FLamby's loss sorts and
ours treats as ties (Breslow). In float64. A row has the loop's C-index as its value, the run's as `ours`, the
largest difference of a weight as `apart`, and the final weight of age, the only input that is not 0 or 1, as
`age`.

    python benchmarks/flamby_same.py tcga_brca.csv
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from flamby import FILE, FIRST_SEED, METHODS, SEEDS, ScaffoldByRows, stored
from flamby_loop import adagrad, gradient
from provenance import require_commit
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.commands.api.own import overrides_for
from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files.append import append
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.local.batches import batches
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_with
from fedfrozen_app.tasks.survival_scores import harrell_c

WEIGHT = "classifier.weight"
Step = Callable[[Tensor], Tensor]


def adam() -> Step:
    """FLamby's FedAdam, with a server's rate of 0.1."""
    m = v = torch.zeros(())

    def step(update: Tensor) -> Tensor:
        nonlocal m, v
        m, v = 0.9 * m + 0.1 * update, 0.999 * v + 0.001 * update**2
        return 0.1 * m / (v.sqrt() + 1e-8)

    return step


def plain() -> Step:
    return lambda update: update


LOOPS: dict[str, Callable[[], Step]] = {
    "fedavg": plain,
    "scaffold_rows": plain,
    "fedadam": adam,
    "fedadagrad": adagrad,
}


def loop(worker: Worker, step: Step, scaffold: bool) -> Tensor:
    """(inputs,) after all rounds, of the weights that the worker holds now."""
    config, parts = worker.config, worker.shares.partition
    assert parts is not None
    x, labels = worker.train_table.inputs["numbers"].double(), worker.train_table.labels.double()
    clients = [str(number) for number in range(len(parts.indices))]
    rows = {client: worker.rows(client).train for client in clients}
    total, rate = sum(map(len, rows.values())), config.client.lr
    weights = worker.initial()[WEIGHT][0].double().clone()
    before, steps = dict.fromkeys(clients, weights), dict.fromkeys(clients, 1)
    corrections = {client: torch.zeros_like(weights) for client in clients}
    for server_round in range(1, config.num_rounds + 1):
        trained = {}
        for client in clients:
            if scaffold:
                corrections[client] = corrections[client] + (weights - before[client]) / (
                    rate * steps[client]
                )
            own = weights
            drawn = batches(rows[client], config.client, config.seed, client, server_round)
            for numbers in drawn:
                time, event = labels[numbers][None].unbind(-1)
                own = own - rate * (
                    gradient(own[None], x[numbers][None], time, event)[0] - corrections[client]
                )
            trained[client], steps[client] = own, len(drawn)
        before = trained
        weights = weights + step(
            sum((len(rows[client]) / total * (trained[client] - weights) for client in clients), 0 * weights)
        )
    return weights


def compared(file: Path, method: str, seed: int, commit: str) -> dict[str, object]:
    words = ["experiment=flamby_tcga_brca", f"dataset.path={file}", f"seed={seed}", "model.dtype=float64"]
    words += [*METHODS["tcga_brca"][method], "runtime.threads=1", "device=cpu", "track.tensorboard=false"]
    words += ["checkpoint.every=0", "baseline=false"]
    if method == "scaffold_rows":
        words += overrides_for("strategy", ScaffoldByRows)
    composed = compose_run(words)
    corpus = load_corpus(composed.config)
    worker = Worker(composed.config, corpus, shares=share_out(corpus, composed.config, None))
    found = loop(worker, LOOPS[method](), method == "scaffold_rows")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        run_with(worker, Job(composed, folder, shown=False))
        ours = read_rows(folder)[-1]["test_c_index"]
        trained = load_file(folder / "model.safetensors")[WEIGHT][0].double()
    time, event = corpus.test.labels.numpy().T
    risk = corpus.test.inputs["numbers"].double() @ found
    return {
        **{"dataset": "tcga_brca", "method": f"same_{method}", "seed": seed, "commit": commit},
        **{"rounds": composed.config.num_rounds, "value": float(harrell_c(time, event, risk.numpy()))},
        **{"ours": ours, "apart": float((found - trained).abs().max()), "age": float(trained[0])},
    }


def main(file: Path) -> None:
    commit, there = require_commit(), {(row["method"], row["seed"]) for row in stored()}
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        for method in LOOPS:
            if (f"same_{method}", seed) not in there:
                append(FILE, json.dumps(compared(file.resolve(), method, seed, commit)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
