"""How long the command takes where nothing is trained: help, version, completion, a mistake.

    python benchmarks/startup.py [--runs 5]

Seconds from the start of the process to its end and of processor time, each the median of so many runs;
and beside them what an empty Python takes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

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


def measure(words: list[str], runs: int) -> dict[str, float]:
    wall, processor = [], []
    for _ in range(runs):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *words], capture_output=True, check=False)
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "seconds": round(statistics.median(wall), 3),
        "processor": round(statistics.median(processor), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for name, words in COMMANDS.items():
        subprocess.run([sys.executable, *words], capture_output=True, check=False)  # files are read once
        print(json.dumps({"command": name, "runs": runs, **measure(words, runs)}), flush=True)


if __name__ == "__main__":
    main()
