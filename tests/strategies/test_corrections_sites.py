"""SCAFFOLD and FedDyn where every client is a site: what they keep is on its disk, and lost with it."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.config import compose_run
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.data.federated import load_corpus, server_only
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.client_state import keep_private, kept_arrays
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server_app import gather
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run
from tests.server.federation import deployed
from tests.server.wire import forget_process, wired, write_sites

METHODS = {"scaffold": ("c", "carried/c/"), "feddyn": ("h", "strategy/")}


def words_for(name, folder):
    words = [word for word in SMALL if not word.startswith(("num_clients", "dataset", "partition"))]
    words += ["dataset=images", f"dataset.path={folder}/data", "dataset.client_validation=0"]
    return [*words, f"strategy={name}", "client.lr=0.05", "model.dtype=float64", "num_rounds=3"]


def nodes_in(folder, sites):
    return [
        {"site": site, "data-path": f"{folder}/data/{site}", "cache-dir": f"{folder}/{sites}-{site}"}
        for site in ("north", "south")
    ]


def in_one_process(words, nodes, folder):
    """The same sites, their messages as bytes, without Flower's processes."""
    composed = compose_run(words)
    config = composed.config
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=server_only(corpus, config))
    forget_process()
    connection = connect(wired(words, nodes, num_clients=2), worker.roles, data_spec=worker.data_spec)
    assert gather(connection.membership, config) is None
    federate(Job(composed, folder), connection, worker)
    return Run(folder)


def on_disk(nodes):
    found = {}
    for node in nodes:
        (path,) = Path(node["cache-dir"]).glob("private/*.safetensors")
        found[node["site"]] = load_file(path)
    return found


def assert_server_has_the_mean(run, kept, space, prefix):
    """Of N = 2 sites that took part in every round, c and h are the means of what they keep."""
    server = checkpoint.newest(run.folder).strategy
    assert all(set(own) == {f"{space}/{name}" for name in run.model} for own in kept.values())
    for name in run.model:
        mean = sum(own[f"{space}/{name}"] for own in kept.values()) / 2
        torch.testing.assert_close(server[f"{prefix}{name}"], mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_what_sites_keep_is_on_their_disks(tmp_path, name):
    write_sites(tmp_path / "data")
    nodes = nodes_in(tmp_path, "wired")
    run = in_one_process(words_for(name, tmp_path), nodes, tmp_path / "run")
    assert [row["clients_failed"] for row in run.rows[1:]] == [0, 0, 0]
    assert_server_has_the_mean(run, on_disk(nodes), *METHODS[name])


@pytest.mark.slow
@pytest.mark.timeout(900)  # processes that each import much: slow where a machine is busy
@pytest.mark.parametrize("name", METHODS)
def test_over_real_supernodes(tmp_path, name):
    write_sites(tmp_path / "data")
    words, nodes, folder = words_for(name, tmp_path), nodes_in(tmp_path, "real"), tmp_path / "deployed"
    with deployed(tmp_path / "federation", nodes) as federation:
        run_config = {"overrides": shlex.join(words), "output-dir": str(folder)}
        federation.run(app_folder(tmp_path / "app"), run_config, timeout=800)
    run = Run(folder)
    assert [row["clients_failed"] for row in run.rows[1:]] == [0, 0, 0]
    assert_server_has_the_mean(run, on_disk(nodes), *METHODS[name])
    twin = in_one_process(words, nodes_in(tmp_path, "wired"), tmp_path / "twin")
    for key, value in twin.model.items():
        if not is_key_bias(key):
            torch.testing.assert_close(run.model[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "settings"), [("scaffold", {"momentum": 0.0}), ("feddyn", {"alpha": 0.1})])
def test_a_site_that_lost_its_arrays_is_told_and_begins_at_zero(tmp_path, caplog, name, settings):
    space = METHODS[name][0]
    node = {"site": "north", "cache-dir": str(tmp_path / "cache")}
    context = wired(SMALL, [node], num_clients=1).contexts[1]
    weights = {"w": torch.ones(2)}
    worker = SimpleNamespace(device=torch.device("cpu"), parameters=weights)
    request = TrainRequest(3, Plan.full(weights), {}, name, settings)
    keep_private(context, {f"{space}/w": torch.full((2,), 5.0)}, local=False)
    del context.state["private"]  # its process ended; its disk did not
    assert kept_arrays(context, worker, request)[f"{space}/w"].tolist() == [5.0, 5.0]
    assert "initialised again" not in caplog.text
    for path in (tmp_path / "cache").glob("private/*"):
        path.unlink()
    kept = kept_arrays(context, worker, request)
    assert kept == {} and "They are initialised again" in caplog.text
    assert request.method.start(weights, {})[space]["w"].tolist() == [0.0, 0.0]
