"""A sweep on a real Slurm of one node, whose jobs are preempted at random.

`pytest -m slow tests/sweep/test_slurm_sweep.py`; FEDFROZEN_SLURM_RUNS=60 for a longer one.
"""

import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.sweep.one_node_slurm import one_node_slurm
from tests.sweep.test_sweep import fedfrozen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
RUNS = int(os.environ.get("FEDFROZEN_SLURM_RUNS", "6"))
WORDS = [*SMALL, "num_rounds=12", "strategy=fedavg,fedfrozen", f"seed=range({RUNS // 2})"]
LAUNCHER = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30"]


@pytest.fixture
def slurm():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with tempfile.TemporaryDirectory(prefix="slurm") as place, one_node_slurm(Path(place)) as found:
        yield found


def rows_of(sweep):
    """By run: the digest of its model after every round, and its scores."""
    found = {}
    for run in sorted(path.parent for path in sweep.glob("*/summary.json")):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[run.name] = [(row["round"], row.get("test_accuracy"), row.get("train_loss")) for row in rows]
    return found


def test_a_third_of_the_jobs_preempted_and_nothing_is_lost_or_run_twice(slurm, tmp_path):
    sweep, rng = tmp_path / "sweep", random.Random(0)
    words = fedfrozen("-m", *WORDS, *LAUNCHER, "hydra.launcher.partition=low", f"output_dir={sweep}")
    with (tmp_path / "said.txt").open("wb") as said:
        child = subprocess.Popen(words, env=slurm.environment, stdout=said, stderr=subprocess.STDOUT)
    preempted = set()
    while child.poll() is None:
        time.sleep(2)
        slurm.hurry()
        training = {
            job
            for job, state in slurm.states().items()
            if state.startswith("R ") and 2 < lines(sweep / job.partition("_")[2] / "metrics.jsonl") < 12
        }
        # One job of three, and each once: what was preempted goes on, and ends.
        if (fresh := training - preempted) and len(preempted) < RUNS // 3 and rng.random() < 0.7:
            slurm.preempt(2)
            preempted |= fresh
    assert child.returncode == 0, (tmp_path / "said.txt").read_text()[-3000:]
    found = rows_of(sweep)
    assert len(found) == RUNS and len(preempted) >= RUNS // 3
    outputs = [path.read_text() for path in sweep.glob(".submitit/*/*_log.*")]
    went_on = sum("Going on after round" in text for text in outputs)
    assert went_on >= min(len(preempted), 1)
    assert all([row[0] for row in rows] == list(range(13)) for rows in found.values())
    runs = (sweep / "comparison_runs.csv").read_text().strip().splitlines()
    assert len(runs) == 1 + RUNS
    alone = tmp_path / "alone"
    done = subprocess.run(
        fedfrozen("-m", *WORDS, "runtime.stack_runs=off", f"output_dir={alone}"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert rows_of(alone) == found


def test_a_partition_that_does_not_exist(slurm, tmp_path):
    words = [*SMALL, "seed=0,1", *LAUNCHER, "hydra.launcher.partition=nowhere", f"output_dir={tmp_path}/s"]
    done = subprocess.run(
        fedfrozen("-m", *words), env=slurm.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr and "hydra.launcher" in done.stderr


def lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0
