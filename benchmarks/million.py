"""A thousand to a million simulated clients, a thousand of them a round: does a round cost what it holds?

    python benchmarks/million.py [--clients 1000 10000 100000 1000000] [--rounds 6] [--flower] [KEY=VALUE...]

Each client has four rows of eight made-up numbers, in NumPy files that are written beforehand; a small
perceptron trains. Every size is a process of its own: seconds from its start until the first round begins,
its largest memory, seconds of each round and from the last one until it ends. The ratio of the sizes goes by
processor time, which a busy machine changes less. The first round is shown apart: the step is built in it.
`--flower` measures Flower's simulation too, at the smallest size and for two rounds.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import show, spread, write_result  # noqa: E402

from fedfrozen_app.files.rows import read_rows  # noqa: E402

ROWS, COLUMNS, TEST, COHORT = 4, 8, 10_000, 1000
START, MEMORY, RATIO = 10.0, 4.0, 1.2  # goals: seconds, gigabytes, rounds of the largest over the smallest
# Notes when the first round begins, and what the process has used when the command ends.
CHILD = """
import json, resource, sys, time
from pathlib import Path
from fedfrozen_app.__main__ import run
note, spawned, *words = sys.argv[1:]
found = {}

def measured():
    from fedfrozen_app.server import train_round
    real = train_round.TrainRound.run
    def first(self):
        found.setdefault("start", time.time() - float(spawned))
        found.setdefault("processor", []).append(time.process_time())
        row = real(self)
        found["last"] = time.time()
        return row
    train_round.TrainRound.run = first

import fedfrozen_app.commands.start as start
read = start.read_data
def read_data(prepared):
    measured()
    return read(prepared)
start.read_data = read_data
code = run(words)
found["after"] = time.time() - found.pop("last")
found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
Path(note).write_text(json.dumps(found))
sys.exit(code)
"""


def write_arrays(folder: Path, clients: int) -> None:
    """Rows in the order of their clients, as a table that is sorted by its users."""
    generator = np.random.default_rng(0)
    for split, rows in (("train", clients * ROWS), ("test", TEST)):
        (folder / split).mkdir(parents=True)
        numbers = generator.standard_normal((rows, COLUMNS), dtype=np.float32)
        labels = (numbers[:, : COLUMNS // 2].sum(1) + 0.5 * generator.standard_normal(rows) > 0).astype(int)
        np.save(folder / split / "numbers.npy", numbers)
        np.save(folder / split / "labels.npy", labels)
    np.save(folder / "train" / "client.npy", np.repeat(np.arange(clients, dtype=np.int32), ROWS))


def words_of(data: Path, clients: int, cohort: int, rounds: int, partition: str) -> list[str]:
    split = ["partition=natural", "partition.column=client"]
    if partition != "natural":
        split = [f"partition={partition}", f"num_clients={clients}", "partition.min_size=1"]
    return [
        *("strategy=fedavg", "dataset=arrays", f"dataset.path={data}", "dataset.validation=0"),
        *("model=mlp", "model.config.hidden_size=16", "client=sgd", "client.lr=0.1", *split),
        *(f"participation={min(1.0, cohort / clients)}", f"num_rounds={rounds}"),
        *("track.tensorboard=false", "dataset.client_validation=0"),
    ]


def measure(words: list[str], folder: Path) -> dict[str, Any]:
    """One process from its start to its end."""
    note, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    command = [sys.executable, "-c", CHILD, str(note), str(time.time()), *words, f"output_dir={folder}"]
    with log.open("w") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
    if code:
        raise SystemExit(f"The run failed:\n{log.read_text()[-3000:]}")
    rows = [row for row in read_rows(folder) if row["round"] > 0]
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    noted = json.loads(note.read_text())
    processor = noted.pop("processor")  # at the beginning of each round
    return {
        **{name: round(value, 3) for name, value in noted.items()},
        "processor_start": round(processor[0], 3),
        "processor_rounds": [round(end - begin, 4) for begin, end in pairwise(processor)],
        "rounds": [round(row["seconds"]["total"], 4) for row in rows],
        "accuracy": rows[-1].get("test_accuracy"),
        "page_kb": round((folder / "report.html").stat().st_size / 1e3, 1),
        "folder_mb": round(used / 1e6, 2),
    }


def flower(words: list[str], folder: Path) -> dict[str, Any]:
    """Flower's simulation of the same run. Its processes' memory is not of this process's children alone:
    it is not measured."""
    began = time.perf_counter()
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "fedfrozen_app", *words, "runtime=flower", f"output_dir={folder}"]
    with log.open("w") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
    if code:
        return {"failed": log.read_text()[-500:]}
    rows = [row for row in read_rows(folder) if row["round"] > 0]
    whole = time.perf_counter() - began
    seconds = [round(row["seconds"]["total"], 3) for row in rows]
    return {"whole": round(whole, 1), "rounds": seconds, "outside_rounds": round(whole - sum(seconds), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--cohort", type=int, default=COHORT)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--partition", default="natural", help="or iid, dirichlet, ...")
    parser.add_argument("--flower", action="store_true")
    parser.add_argument("--out", default="million", help="name of the result")
    given, overrides = parser.parse_known_args()
    folder, found = Path(tempfile.mkdtemp(prefix="million-")), {}
    result: dict[str, Any] = {"cohort": given.cohort, "partition": given.partition, "sizes": found}
    try:
        for clients in given.clients:
            data = folder / f"data-{clients}"
            write_arrays(data, clients)
            words = words_of(data, clients, given.cohort, given.rounds, given.partition)
            found[str(clients)] = measure([*words, *overrides], folder / f"run-{clients}")
            print(clients, json.dumps(found[str(clients)]), flush=True)
            if given.flower and clients == given.clients[0]:
                short = [word for word in words if not word.startswith("num_rounds=")]
                result["flower"] = {
                    str(clients): flower([*short, "num_rounds=2", *overrides], folder / "flower")
                }
                print("flower", json.dumps(result["flower"]), flush=True)
            shutil.rmtree(data)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: spread(one["rounds"][1:]).median for name, one in found.items()}
    used = {name: spread(one["processor_rounds"][1:]).median for name, one in found.items()}
    least, most = (used[str(clients)] for clients in (given.clients[0], given.clients[-1]))
    last = found[str(given.clients[-1])]
    checks = {
        f"starts within {START:g} s": last["start"] <= START,
        f"stays under {MEMORY:g} GB": last["memory"] <= MEMORY,
        f"rounds at most {RATIO:g} times those of the smallest": most <= RATIO * least,
    }
    path = write_result(given.out, result)
    rows = [
        [
            f"{int(name):,}",
            *(f"{one['start']:.1f}", f"{one['memory']:.2f}", f"{one['rounds'][0]:.2f}"),
            *(f"{medians[name]:.3f}", f"{used[name]:.3f}", f"{one['after']:.1f}"),
        ]
        for name, one in found.items()
    ]
    heads = ["clients", "seconds to start", "GB", "first round"]
    heads += ["seconds a round", "of a processor", "after the last"]
    show(f"Cohorts of {given.cohort:,}", heads, rows, checks, path)


if __name__ == "__main__":
    main()
