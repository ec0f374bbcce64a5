"""Train the headline cell of the map, or the default run, on a CPU.

    python benchmarks/cpu_repeat.py digits_few      FedAvg, and frozen after half of the rounds; seeds 0 to 9
    python benchmarks/cpu_repeat.py default         frozen after 16, 24 and 32 of 32 rounds; seeds 30 to 35

Each run is one row of `results/regimes/cpu.jsonl` with its commit, appended when the run ends; rows that are
there are not trained again. About a minute per run on one core.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from cells import append, curve, read
from provenance import require_commit

import fedfrozen
from fedfrozen_app.files.rows import read_rows

ROWS = Path(__file__).parent / "results" / "regimes" / "cpu.jsonl"
ARMS = {
    "digits_few": {
        "fedavg": ["experiment=digits_few", "strategy=fedavg"],
        "fedfrozen": ["experiment=digits_few", "strategy=fedfrozen", "strategy.warmup_rounds=30"],
    },
    "default": {str(after): [f"strategy.warmup_rounds={after}"] for after in (16, 24, 32)},
}
SEEDS = {"digits_few": range(10), "default": range(30, 36)}


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return (row["experiment"], row["strategy"], row["seed"])


def train(experiment: str, strategy: str, seed: int, commit: str, more: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = fedfrozen.run(
            *ARMS[experiment][strategy],
            *("device=cpu", "runtime.threads=1", "track.tensorboard=false"),
            *more,
            seed=seed,
            output_dir=f"{folder}/run",
        )
        rows, config = read_rows(Path(run.folder)), run.summary["config"]
    return {
        "experiment": experiment,
        "strategy": strategy,
        "seed": seed,
        "rounds": config["num_rounds"],
        "every": config["eval_every"],
        "curve": [round(value, 4) for value in curve(rows, "test_accuracy")],
        "megabytes": round(sum(row.get("bytes_up", 0) + row.get("bytes_down", 0) for row in rows) / 1e6, 1),
        "device": "cpu",
        "seconds": round(time.perf_counter() - began, 1),
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=ARMS)
    parser.add_argument("--seeds", type=int, help="the first so many")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--set", nargs="*", default=[], help="more overrides; use another --rows with them")
    options = parser.parse_args()
    commit = require_commit()
    done = {key_of(row) for row in read(options.rows)}
    for seed in SEEDS[options.experiment][: options.seeds]:
        for strategy in ARMS[options.experiment]:
            if (options.experiment, strategy, seed) not in done:
                row = train(options.experiment, strategy, seed, commit, options.set)
                append(options.rows, row)
                print(f"{strategy} seed {seed}: {row['curve'][-1]:.4f} in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
