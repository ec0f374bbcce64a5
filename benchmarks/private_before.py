"""The private runner on real clinical notes, against the one of an earlier checkout: seconds a round.

    git worktree add /tmp/before 4a3b967   (before clients took their private steps together)
    python benchmarks/private_before.py --before /tmp/before --data DIR --model DIR     (on a GPU)
    ... --device cpu --rounds 2 --tokens 8 --repeats 1                                  (to see it work)

DIR: MTSamples, and a folder with MiniLM. Eight clients, batches of 64, epsilon 8: the head alone, and two
layers (SAFL with fixed ones). These once more with noise of a seed, which both checkouts draw alike; secret
noise was a GPU's generator then and is a cipher now. Each turn is a process of either checkout, whose rounds
are counted after the first ones, in which a GPU's steps are recorded. Both must spend the same epsilon.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, interleave, ratio, run_quietly, show, spread, write_result

HERE = Path(__file__).parents[1]
LEAST, RECORDED = 8, 6
TWO = ["strategy.select=fixed", "strategy.top_k=2"]
PLANS = {
    "the head": ["strategy.select=none"],
    "two layers": TWO,
    "two layers, noise of a seed": [*TWO, "privacy.seeded_noise=true"],
}


def words_for(options: Any, plan: str) -> list[str]:
    return [
        *("strategy=safl", *PLANS[plan], "privacy=dp_sgd", "privacy.epsilon=8", "partition=iid"),
        *("dataset=mtsamples", f"dataset.path={Path(options.data).resolve()}"),
        *("model=checkpoint", f"model.path={Path(options.model).resolve()}"),
        *(f"dataset.max_tokens={options.tokens}", "num_clients=8", "client.batch_size=64"),
        *(f"num_rounds={options.rounds}", f"eval_every={options.rounds}", "checkpoint.every=0"),
        *(f"device={options.device}", f"client.precision={options.precision}"),
    ]


def run(tree: Path, words: list[str]) -> tuple[list[float], float]:
    """The seconds of training of each counted round, and the largest epsilon of a client by the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedfrozen_app", *words, f"output_dir={folder}/run"]
        run_quietly(command, tree, os.environ | {"PYTHONPATH": str(tree)})
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    trained = [row["seconds"]["train"] for row in rows if row["round"]]
    return trained[min(RECORDED, len(trained) - 1) :], max(rows[-1]["epsilon"].values())


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], repeats=1)
    parser.add_argument("--before", required=True, type=Path, help="the earlier checkout")
    parser.add_argument("--data", required=True, help="MTSamples")
    parser.add_argument("--model", required=True, help="a folder with MiniLM")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    options = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    spent: dict[str, set[float]] = {}
    for plan in options.plans:
        words = words_for(options, plan)
        runners = {
            "before": lambda words=words: run(options.before.resolve(), words),
            "together": lambda words=words: run(HERE, [*words, "runtime.runner=cohort"]),
        }
        found = interleave(runners, options.repeats, lambda number, name, value: print(name, value))
        seconds[plan] = {name: [s for own, _ in values for s in own] for name, values in found.items()}
        spent[plan] = {round(epsilon, 6) for values in found.values() for _, epsilon in values}
    times = {plan: ratio(each["before"], each["together"]) for plan, each in seconds.items()}
    figures = {
        plan: {name: spread(values) for name, values in each.items()} for plan, each in seconds.items()
    }
    epsilons = {plan: sorted(each) for plan, each in spent.items()}
    setting = {key: getattr(options, key) for key in ("rounds", "tokens", "precision", "device")}
    result = {"setting": setting, "seconds": figures, "times_quicker": times, "epsilon": epsilons}
    path = write_result("private_before", result)
    checks = {f"{plan}: at least {LEAST} times": value.median >= LEAST for plan, value in times.items()}
    checks |= {f"{plan}: the same epsilon": len(each) == 1 for plan, each in spent.items()}
    rows = [
        [plan, *(f"{value:.2f}" for value in figures[plan].values()), f"{times[plan]:.1f}"]
        for plan in figures
    ]
    heads = ("trained", "before, s", "together, s", "times quicker")
    show("A round of eight private clients on MTSamples", heads, rows, checks, path)


if __name__ == "__main__":
    main()
