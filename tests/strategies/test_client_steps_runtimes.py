"""Methods with client steps of their own: Flower's simulation, real SuperNodes and stacked sweeps agree."""

import json
import shlex

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.app_folder import app_folder
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run
from tests.server.federation import deployed
from tests.server.wire import write_sites
from tests.strategies.test_client_steps import FLOAT64, KEEPS, METHODS
from tests.strategies.test_corrections_sites import in_one_process, nodes_in, on_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # processes that each import much


def assert_same_model(one, other):
    for name, value in one.items():
        if not is_key_bias(name):
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_flower_s_simulation_equals_one_process(train, tmp_path, name):
    words = [*METHODS[name], *FLOAT64, "num_rounds=2"]
    one, folder = train(*words, folder="one"), tmp_path / "flower"
    assert command([*SMALL, *words, "runtime=flower", f"output_dir={folder}", f"hydra.run.dir={folder}"]) == 0
    assert_same_model(one.model, Run(folder).model)
    assert [row["bytes_up"] for row in one.rows] == [row["bytes_up"] for row in Run(folder).rows]


@pytest.mark.parametrize("name", METHODS)
def test_over_real_supernodes(tmp_path, name):
    write_sites(tmp_path / "data")
    words = [word for word in SMALL if not word.startswith(("num_clients", "dataset", "partition"))]
    words += [
        "dataset=images",
        f"dataset.path={tmp_path}/data",
        "dataset.client_validation=0",
        "num_rounds=2",
    ]
    words += [*METHODS[name], *FLOAT64]
    nodes, folder = nodes_in(tmp_path, "real"), tmp_path / "deployed"
    with deployed(tmp_path / "federation", nodes) as federation:
        run_config = {"overrides": shlex.join(words), "output-dir": str(folder)}
        federation.run(app_folder(tmp_path / "app"), run_config, timeout=1200)
    run = Run(folder)
    assert [row["clients_failed"] for row in run.rows[1:]] == [0, 0]
    twin = in_one_process(words, nodes_in(tmp_path, "wired"), tmp_path / "twin")
    assert_same_model(twin.model, run.model)
    if name in KEEPS:
        for site, kept in on_disk(nodes).items():
            assert set(kept) == {f"m/{key}" for key in run.model}, site


@pytest.mark.parametrize("name", METHODS)
def test_a_stacked_sweep_equals_runs_alone(tmp_path, name):
    words = ["-m", *SMALL, *METHODS[name], *FLOAT64, "num_rounds=2", "runtime.runner=cohort", "seed=0,1"]
    models = {}
    for stack in ("off", "2"):
        folder = tmp_path / stack
        assert command([*words, f"output_dir={folder}", f"runtime.stack_runs={stack}"]) == 0
        models[stack] = [Run(folder / number).model for number in "01"]
    for alone, stacked in zip(*models.values(), strict=True):
        assert_same_model(alone, stacked)
    assert json.loads((folder / "0" / "summary.json").read_text())["status"] == "completed"
