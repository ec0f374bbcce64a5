"""Set-up F: clients stacked on a GPU, against clients in turn and against central training.

    python benchmarks/cohort.py --data DIR      (a folder with train.parquet and test.parquet of CIFAR-10)

Whole rounds of the app (exchange, training, aggregation; evaluation apart), ViT d=192, 6 layers, bf16, AdamW.
Useful images only: padding is not work. One row a set-up: clients x batch, equal sizes or Dirichlet 0.3.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import write_result

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.models.task import Batch
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.runtime.resident import Resident

SETUPS = [(10, 64), (50, 32)]
WARM = 1  # rounds that are not timed


def words_for(arguments, clients, batch, partition, *extra):
    words = ["strategy=fedavg", "model=vit_cifar", "dataset=parquet", f"dataset.path={arguments.data}"]
    words += [f"num_clients={clients}", f"client.batch_size={batch}", "client.local_epochs=1"]
    words += ["client.precision=bf16", "client.lr=1e-3", "client.lr_schedule=constant"]
    words += [
        "dataset.validation=0",
        "dataset.client_validation=0",
        "eval_every=100000",
        "checkpoint.every=0",
    ]
    words += ["partition=iid"] if partition == "equal" else ["partition=dirichlet", "partition.alpha=0.3"]
    return words + list(extra)


def app_rounds(arguments, words, corpus):
    """Seconds of each round after the first, which compiles, and the images each round trained on."""
    plain = resolved(compose_config(words))
    config = read(plain)
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.reset_peak_memory_stats()
        run_in_process(config, plain, words, Path(folder), corpus=corpus)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    parts = share_out(corpus, config, config.num_clients).partition.indices
    limit = (config.client.local_steps or 10**9) * config.client.batch_size
    images = sum(min(len(part), limit) for part in parts)
    seconds = [row["seconds"]["train"] + row["seconds"]["aggregate"] for row in rows[1 + WARM :]]
    phases = {
        key: statistics.median(row["seconds"].get(key, 0.0) for row in rows[1 + WARM :])
        for key in ("train", "aggregate")
    }
    first = rows[1]["seconds"]["train"]
    return {
        "seconds": seconds,
        "images": images,
        "first_round": first,
        "phases": phases,
        "vram_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def central(arguments, words, corpus, batch, steps, compiled):
    """The same model and optimiser on one big batch: seconds of each repeat of `steps` steps."""
    config = read(resolved(compose_config(words)))
    resident = Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))
    resident.model.train()
    model = torch.compile(resident.model) if compiled else resident.model
    task = resident.task.with_call(lambda parameters, inputs: model(**inputs).logits)
    optimizer = torch.optim.AdamW(resident.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    seconds = []
    for repeat in range(arguments.rounds + WARM):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            index = torch.randint(len(corpus.train), (batch,), device=resident.device)
            loss = task.loss({}, Batch(*resident.take(index)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        if repeat >= WARM:
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "images": batch * steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of the quick runners")
    parser.add_argument("--sequential-rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="at most so many local steps a round")
    parser.add_argument("--only", choices=["10", "50"], default=None)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    base = read(resolved(compose_config(words_for(arguments, 10, 64, "equal"))))
    corpus = load_corpus(base)
    results = []
    for clients, batch in SETUPS:
        if arguments.only and str(clients) != arguments.only:
            continue
        for partition in ("equal", "dirichlet"):
            steps = [] if arguments.steps is None else [f"client.local_steps={arguments.steps}"]

            def words(runner, rounds, clients=clients, batch=batch, partition=partition, steps=steps):
                extra = [f"runtime.runner={runner}", f"num_rounds={rounds + WARM}", *steps]
                return words_for(arguments, clients, batch, partition, *extra)

            row = {"clients": clients, "batch": batch, "partition": partition}
            row["cohort"] = app_rounds(arguments, words("cohort", arguments.rounds), corpus)
            row["sequential"] = app_rounds(
                arguments, words("sequential", arguments.sequential_rounds), corpus
            )
            count = min(30, max(1, row["cohort"]["images"] // (clients * batch)))
            for name, compiled in (("central", False), ("central_compiled", True)):
                row[name] = central(
                    arguments, words("sequential", 1), corpus, clients * batch, count, compiled
                )
            for name in ("cohort", "sequential", "central", "central_compiled"):
                part = row[name]
                part["images_per_second"] = part["images"] / statistics.median(part["seconds"])
            rate = row["cohort"]["images_per_second"]
            row["ratios"] = {
                f"cohort_over_{name}": rate / row[name]["images_per_second"]
                for name in ("sequential", "central", "central_compiled")
            }
            print(
                json.dumps({k: v for k, v in row.items() if k in ("clients", "batch", "partition", "ratios")})
            )
            for name in ("cohort", "sequential", "central", "central_compiled"):
                print("  ", name, row[name], flush=True)
            results.append(row)
    write_result("cohort", {"gpu": torch.cuda.get_device_name(), "results": results})


if __name__ == "__main__":
    main()
