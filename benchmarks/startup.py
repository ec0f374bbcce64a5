"""How long the command takes where nothing is trained, and until a run's first round begins.

    python benchmarks/startup.py [--runs 5] [--finished RUN] [--other CHECKOUT]

Seconds from the start of the process to its end and of processor time, each the median of so many runs with
the least and the most; and beside them what an empty Python takes. With a finished run also the verbs that
look at one. With a checkout of another commit each command is measured there in turn, and the ratio is this
checkout's processor time over the other's.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "python": ["-c", "pass"],
    "--help": ["-m", "fedfrozen_app", "--help"],
    "--version": ["-m", "fedfrozen_app", "--version"],
    "plan --help": ["-m", "fedfrozen_app", "plan", "--help"],
    "site check --help": ["-m", "fedfrozen_app", "site", "check", "--help"],
    "completion bash": ["-m", "fedfrozen_app", "completion", "bash"],
    "an unknown verb": ["-m", "fedfrozen_app", "lst"],
    "an unknown key": ["-m", "fedfrozen_app", "num_round=5"],
    "an unknown key of a strategy": ["-m", "fedfrozen_app", "strategy=fedprox", "strategy.nu=1"],
    "an unknown name": ["-m", "fedfrozen_app", "strategy=fedfrozn"],
    "an unknown key of a sweep": ["-m", "fedfrozen_app", "-m", "num_round=5,6"],
}


# Ends the process when the first round would begin. Of the default run: what it imports and prepares.
FIRST_ROUND = """
import sys
from fedfrozen_app.__main__ import run
from fedfrozen_app.server import train_round

def stop(self):
    raise SystemExit

train_round.TrainRound.run = stop
run(sys.argv[1:])
"""


def looks(run: str) -> dict[str, list[str]]:
    """The verbs that look at a finished run; each of these takes it."""
    module = ["-m", "fedfrozen_app"]
    verbs = {verb: [*module, verb, run] for verb in ("list", "show", "report", "verify")}
    return verbs | {"compare": [*module, "compare", run, run], "plan": [*module, "plan"]}


def once(words: list[str], checkout: Path) -> tuple[float, float]:
    """Seconds from start to end, and of processor time."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run([sys.executable, *words], capture_output=True, check=False, env=environment, cwd=empty)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(found: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Median, least and most."""
    columns = dict(zip(("seconds", "processor"), zip(*found, strict=True), strict=True))
    return {
        name: [round(value, 3) for value in (statistics.median(values), min(values), max(values))]
        for name, values in columns.items()
    }


def measure(words: list[str], runs: int, checkouts: dict[str, Path]) -> dict[str, object]:
    """The checkouts take turns, so that a busy minute is every one's."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in checkouts}
    for checkout in checkouts.values():
        once(words, checkout)  # files are read, and compiled, once
    for _ in range(runs):
        for name, checkout in checkouts.items():
            found[name].append(once(words, checkout))
    row: dict[str, object] = {name: figures(taken) for name, taken in found.items()}
    if "other" in found:
        medians = {name: statistics.median(cpu for _, cpu in taken) for name, taken in found.items()}
        row["ratio"] = round(medians["this"] / medians["other"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--finished", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    checkouts = {"this": Path(__file__).parents[1]}
    if given.other is not None:
        checkouts["other"] = given.other.resolve()
    commands = COMMANDS | {"until the first round": ["-c", FIRST_ROUND]}
    if given.finished is not None:
        commands |= looks(str(given.finished.resolve()))
    for name, words in commands.items():
        if not given.only or name in given.only:
            row = {"command": name, "runs": given.runs, **measure(words, given.runs, checkouts)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
