"""One app, three runtimes, one result: in process, Flower's simulation, real SuperNodes."""

import re
import shlex

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.runtime.simulation import app_folder
from tests.conftest import SMALL, Run
from tests.runtime.federation import deployed

# A width and a learning rate at which accuracies move: at chance every comparison would pass.
MOVING = ["num_rounds=2", "dataset.limit=null", "client.local_epochs=2", "strategy.warmup_rounds=1"]


def same_result(one: Run, other: Run) -> None:
    """Cohorts and bytes equal, weights within 1e-3 of the update, accuracies within two images."""
    start, end, again = (
        {name: run_model[name].double() for name in one.model if not is_key_bias(name)}
        for run_model in (one.model_after(1), one.model, other.model)
    )
    moved = torch.cat([(end[name] - start[name]).flatten() for name in end]).norm()
    apart = torch.cat([(end[name] - again[name]).flatten() for name in end]).norm()
    assert moved > 0 and apart <= 1e-3 * moved
    assert len(one.rows) == len(other.rows)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("round", "stage", "clients", "bytes_up", "bytes_down", "bytes_up_by_role"):
            assert row.get(key) == twin.get(key), key
        assert abs(row["test_accuracy"] - twin["test_accuracy"]) <= 2 / 359


def is_key_bias(name):
    """Softmax ignores them, and Adam blows their rounding noise up."""
    return name.endswith(("k_proj.bias", "key.bias"))


def test_flower_simulation_equals_one_process(train, tmp_path):
    one = train(*MOVING, "participation=0.7", folder="one")
    folder = tmp_path / "flower run, with a space"
    words = [*SMALL, *MOVING, "participation=0.7", "runtime=flower", f"output_dir='{folder}'"]
    assert command([*words, f"hydra.run.dir='{folder}'"]) == 0
    same_result(one, Run(folder))
    assert Run(folder).summary["status"] == "completed"
    assert (folder / "report.html").exists() and (folder / "curves.png").exists()
    # Two workers answered three clients in two rounds, and each loaded the model and the data once.
    workers = re.findall(r"Worker (\d+) trains on cpu and keeps", (folder / "flower" / "run.log").read_text())
    assert len(workers) == len(set(workers)) == 2


@pytest.mark.slow  # tests/sites/test_deployed.py does the same with TLS and node keys in the default run
def test_deployed_supernodes_equal_one_process(train, tmp_path):
    settings = [*MOVING, "num_clients=2"]
    one = train(*settings, folder="one")
    folder = tmp_path / "deployed"
    nodes = [{"partition-id": number, "num-partitions": 2} for number in range(2)]
    with deployed(tmp_path / "federation", nodes) as federation:
        overrides = shlex.join([*SMALL, *settings])
        app = app_folder(tmp_path / "app")
        federation.run(app, {"overrides": overrides, "output-dir": str(folder)}, timeout=280)
    same_result(one, Run(folder))
