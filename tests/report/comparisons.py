"""Sweeps on disk with runs of known curves, for the comparison page."""

import random
from pathlib import Path

from .conftest import make_rows, make_summary, save


def make_sweep(folder: Path, strategies=("fedavg", "fedfrozen"), alphas=(0.1,), seeds=3, rounds=20) -> Path:
    """Run N of strategy s has its curve shifted by a seeded draw; only fedfrozen drops the kernel's bytes."""
    number = 0
    for strategy in strategies:
        for alpha in alphas:
            for seed in range(seeds):
                draw = random.Random(f"{strategy}{alpha}{seed}")
                rows = make_rows(rounds=rounds, warmup=5 if strategy == "fedfrozen" else rounds)
                shift = draw.gauss(-0.04 if alpha < 0.2 else 0.0, 0.01)
                for row in rows[1:]:
                    row["test_accuracy"] += shift + draw.gauss(0, 0.004)
                    row["test_loss"] -= shift
                summary = make_summary(rows)
                summary["config"] |= {
                    "strategy": {"name": strategy},
                    "partition": {"name": "dirichlet", "alpha": alpha},
                    "seed": seed,
                }
                summary |= {"seed": seed, "command": f"fedfrozen strategy={strategy} seed={seed}"}
                save(folder / str(number), rows, summary)
                number += 1
    return folder
