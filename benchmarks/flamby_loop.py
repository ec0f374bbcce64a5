"""A plain torch loop of two of FLamby's methods on TCGA-BRCA: is a deviation our code's, or the seeds'?

Seeds give torch's own first weights, as FLamby's 42 to 46 gave FLamby's; seeds 0 to 9 are further
ones. SCAFFOLD's rate is 0.01, FedAdagrad's server has momentum 0.9: the
settings of `flamby.METHODS`. All seeds are trained side by side, as rows of one tensor.

    python benchmarks/flamby_loop.py tcga_brca.csv
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
from flamby import FILE, NO_INPUTS, SITES, stored
from provenance import require_commit
from torch import Tensor

from fedfrozen_app.files.append import append
from fedfrozen_app.tasks.survival_scores import harrell_c

SEEDS = (*range(42, 47), *range(10))
ROUNDS, STEPS, BATCH, RATE = 5, 100, 8, 0.01
INPUTS = 39


def first_weights(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.nn.Linear(INPUTS, 1, bias=False).weight.detach()[0].double()


def gradient(weights: Tensor, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """(seeds, inputs), of the mean over each batch of Cox's loss by falling time, without the first row's."""
    order = time.argsort(dim=1, descending=True)
    x, event = x.gather(1, order[..., None].expand_as(x)), event.gather(1, order)
    scores = (x * weights[:, None]).sum(dim=-1)
    hazards = (scores - scores.max(dim=1, keepdim=True).values).exp()
    risk = hazards.cumsum(dim=1)
    mean = (hazards[..., None] * x).cumsum(dim=1) / risk[..., None].clamp(min=1e-300)
    event = torch.cat([torch.zeros_like(event[:, :1]), event[:, 1:]], dim=1)
    return (event[..., None] * (mean - x)).mean(dim=1)


def batches(rows: int, generators: list[torch.Generator]) -> Iterator[Tensor]:
    """(seeds, rows of a batch) of row numbers, every epoch in a new order."""
    while True:
        orders = torch.stack([torch.randperm(rows, generator=one) for one in generators])
        yield from orders.split(BATCH, dim=1)


def trained(file: Path, scaffold: bool, step: Callable[[Tensor], Tensor]) -> Tensor:
    """(seeds, inputs) after all rounds; `step`: what the server adds for a mean update."""
    table = pd.read_csv(file)
    names = [name for name in table.columns if name not in NO_INPUTS]
    parts = [table[(table["split"] == "train") & (table["site"] == site)] for site in SITES["tcga_brca"]]
    x, time, event = (
        [torch.tensor(part[columns].to_numpy(), dtype=torch.float64) for part in parts]
        for columns in (names, "T", "E")
    )
    shares = torch.tensor([len(part) / sum(map(len, parts)) for part in parts], dtype=torch.float64)
    weights = torch.stack([first_weights(seed) for seed in SEEDS])
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    drawn = [batches(len(part), generators) for part in parts]
    corrections = [torch.zeros_like(weights) for _ in parts]
    before = [weights.clone() for _ in parts]
    for _ in range(ROUNDS):
        own = []
        for site in range(len(parts)):
            if scaffold:  # less the mean of all clients' movements, weighted by their rows
                corrections[site] += (weights - before[site]) / (RATE * STEPS)
            local = weights.clone()
            for _ in range(STEPS):
                rows = next(drawn[site])
                local -= RATE * (
                    gradient(local, x[site][rows], time[site][rows], event[site][rows]) - corrections[site]
                )
            own.append(local)
        before = own
        weights = weights + step(sum(share * (one - weights) for share, one in zip(shares, own, strict=True)))
    return weights


def adagrad() -> Callable[[Tensor], Tensor]:
    """FLamby's FedAdagrad, with a server's rate of 1."""
    m = v = torch.zeros(())

    def step(update: Tensor) -> Tensor:
        nonlocal m, v
        m, v = 0.9 * m + 0.1 * update, v + update**2
        return m / (v.sqrt() + 1e-8)

    return step


def main(file: Path) -> None:
    commit, there = require_commit(), {(row["method"], row["seed"]) for row in stored()}
    test = pd.read_csv(file).query("split == 'test'")
    names = [name for name in test.columns if name not in NO_INPUTS]
    for method, scaffold, step in (
        ("scaffold_rows", True, lambda update: update),
        ("fedadagrad", False, adagrad()),
    ):
        risks = test[names].to_numpy() @ trained(file, scaffold, step).T.numpy()
        for seed, risk in zip(SEEDS, risks.T, strict=True):
            found = {"dataset": "tcga_brca", "method": f"loop_{method}", "seed": seed, "rounds": ROUNDS}
            if (f"loop_{method}", seed) not in there:
                value = float(harrell_c(test["T"], test["E"], risk))
                append(FILE, json.dumps(found | {"commit": commit, "value": value}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
