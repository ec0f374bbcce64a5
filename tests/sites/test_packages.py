"""A method of somebody else's package, over Flower's simulation and real sites that have the package."""

import os

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.__main__ import run as command
from tests.app.page_package import VARIATES
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run
from tests.sites.federation import SITES, federation
from tests.sites.twin import join, largest_difference, the_same_in_process, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def everywhere(installed, monkeypatch):
    """On the path of every process that a test starts."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{before}" if before else str(installed))
    return installed


def test_in_flower_s_simulation_as_in_one_process(everywhere, train, tmp_path):
    given = [*SMALL, *VARIATES, "num_rounds=3", "participation=0.7"]
    one = train(*VARIATES, "num_rounds=3", "participation=0.7", folder="one")
    assert command([*given, "runtime=flower", f"output_dir={tmp_path}/flower"]) == 0
    other = Run(tmp_path / "flower")
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("clients", "bytes_up", "bytes_down", "bytes_up_by_role", "bytes_down_by_role"):
            assert row.get(key) == twin.get(key), key
    for name, value in one.model.items():
        if not is_key_bias(name):
            torch.testing.assert_close(other.model[name], value, rtol=1e-9, atol=1e-11)


def test_over_real_sites_with_its_state_on_their_disks(everywhere, tmp_path):
    """TLS, node keys, executors. Halfway one site loses all its processes, and goes on from its own disk."""
    sites = SITES[:2]
    rounds = (*VARIATES, "num_rounds=4", "runtime.min_nodes=2", "runtime.node_timeout=60")
    with federation(tmp_path / "fed", sites) as deployment:
        join(deployment, sites)
        refused = words(deployment, tmp_path / "refused", *rounds, "runtime.node_timeout=20")
        assert command(refused) != 0  # the policy does not name this strategy yet
        for site in sites:
            deployment.change(site, "policy.yaml", strategies=["variates"])
        run_id = "run_id=ours"
        assert command(words(deployment, tmp_path / "run", *rounds, run_id, "num_rounds=2")) == 0
        for process in ("executor", "supernode"):
            deployment.kill(f"{sites[0]}-{process}")
        deployment.restart_site(sites[0])
        assert command(["resume", str(tmp_path / "run"), "num_rounds=4"]) == 0
        run = Run(tmp_path / "run")
        (tmp_path / "twin").mkdir()
        twin = the_same_in_process(deployment, sites, tmp_path / "twin", *rounds)
        assert largest_difference(run, twin) <= 1e-6
        assert [row["clients_failed"] for row in run.rows[1:]] == [0] * 4
        for site in sites:
            (path,) = (deployment.kits / site / "var" / "state" / "ours").glob("*/4/private.safetensors")
            kept = load_file(path)
            assert set(kept) == {f"c/{name}" for name in run.model}
            assert any(value.abs().max() > 0 for value in kept.values())
