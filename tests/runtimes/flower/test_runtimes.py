"""One app, three runtimes, one result: in process, Flower's simulation, real SuperNodes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.files.seal import sealed, unsealed
from fedfrozen_app.runtimes.flower import simulated as running
from fedfrozen_app.runtimes.flower.processes import executable, free_port
from fedfrozen_app.runtimes.flower.simulation import ray_nodes
from fedfrozen_app.server import hooks
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run, same_bits, slowly
from tests.server.federation import deployed

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


@pytest.mark.slow  # a dozen processes begin: a minute alone, a tenth of what all quick tests may take
@pytest.mark.timeout(600)
def test_flower_simulation_equals_one_process(train, tmp_path, capsys):
    one = train(*MOVING, "participation=0.7", folder="one")
    folder = tmp_path / "flower run, with a space"
    words = [*SMALL, *MOVING, "participation=0.7", "runtime=flower", f"output_dir='{folder}'"]
    assert command([*words, f"hydra.run.dir='{folder}'"]) == 0
    same_result(one, Run(folder))
    said = capsys.readouterr().out
    assert "round 2/2" in said and not re.search("RayBackend|ServerApp|to each site|executor", said)
    assert Run(folder).summary["status"] == "completed"
    assert (folder / "report.html").exists() and (folder / "curves.png").exists()
    # Two workers answered three clients in two rounds, and each loaded the model and the data once.
    workers = re.findall(r"Worker (\d+) trains on cpu and keeps", (folder / "flower" / "run.log").read_text())
    assert len(workers) == len(set(workers)) == 2


@pytest.mark.parametrize("strategy", ["local", *slowly("fedfrozen")])
def test_an_interrupted_simulation_leaves_what_every_run_does(train, tmp_path, monkeypatch, capsys, strategy):
    """Its ServerApp, whose process Flower ends, is here a run of which only checkpoints and rows are left."""
    folder = tmp_path / "run"

    def interrupted(app, settings, **more):
        train("num_rounds=2", f"strategy={strategy}")
        for name in ("summary.json", "report.html", "model.safetensors"):
            (folder / name).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_app", interrupted)
    assert command([*SMALL, "runtime=flower", f"strategy={strategy}", f"output_dir={folder}"]) == 130
    # What clients kept for themselves is gone: such a run cannot be resumed.
    assert ("Go on with: fedfrozen resume" in capsys.readouterr().err) == (strategy != "local")
    run = Run(folder)
    assert run.summary["status"] == "interrupted" and run.summary["rounds"] == 2
    assert run.summary["final_test_accuracy"] == run.rows[-1]["test_accuracy"]
    assert ("majority_accuracy" in run.summary) == (strategy != "local")
    assert same_bits(run.model, run.model_after(2))
    assert "2 of 2, interrupted" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_ctrl_c_in_a_real_simulation_leaves_what_every_run_does(tmp_path):
    folder = tmp_path / "flower"
    command_line = [sys.executable, "-m", "fedfrozen_app", *SMALL, "num_rounds=500", "runtime=flower"]
    with subprocess.Popen(
        [*command_line, f"output_dir={folder}"], stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        assert any(line.startswith("round 2/") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said = "".join(process.communicate())
    assert process.returncode == 130 and f"fedfrozen resume {folder}" in said
    run = Run(folder)
    assert run.summary["status"] == "interrupted" and run.summary["rounds"] >= 2
    assert same_bits(run.model, run.model_after(run.summary["rounds"]))
    assert (folder / "report.html").exists() and (folder / "curves.png").exists()


@pytest.mark.slow
def test_ctrl_c_over_a_checkpoint_that_says_nothing_of_private_parts(train, monkeypatch, capsys):
    """As those of runs before there was a word on it: the first round that goes on has not ended yet."""
    run = train("num_rounds=2")
    path = run.folder / "checkpoints" / "2" / "state.json"
    state = unsealed(path)
    del state["hooks"]["private"]
    path.write_text(sealed(state, *(file for file in path.parent.iterdir() if file != path)))

    def interrupted(*app, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_app", interrupted)
    assert command(["resume", str(run.folder), "num_rounds=3", "runtime=flower"]) == 130
    assert "Go on with: fedfrozen resume" in capsys.readouterr().err


def test_a_dead_worker_ends_a_simulation_and_nothing_else(monkeypatch):
    died = "Client 1 was set aside: it failed: <class 'ray.exceptions.ActorDiedError'>:<'The actor died'>."
    sound, harmed = {"round": 4}, {"round": 5, "failures": [died]}
    alive = hooks.WorkersAlive(Path("a run"))
    assert alive.after_round(None, harmed) == (False, {})  # a site may say what it likes
    monkeypatch.setattr(hooks, "simulated", lambda: True)
    assert alive.after_round(None, sound) == (False, {})
    with pytest.raises(RunFailed, match=r"died in round 5.*continue with `fedfrozen resume 'a run'`"):
        alive.after_round(None, harmed)


@contextmanager
def ray_cluster(nodes):
    """A Ray cluster of so many nodes with one CPU each, all on this machine; gives its address."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray")  # a socket's path must be short
    head = ["--head", f"--port={port}", f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}"]
    head += ["--include-dashboard=false", "--disable-usage-stats"]
    started = []
    try:
        for words in [head] + (nodes - 1) * [[f"--address=127.0.0.1:{port}"]]:
            command_line = [executable("ray"), "start", "--block", "--num-cpus=1", *words]
            started.append(subprocess.Popen(command_line, stdout=PIPE, text=True, process_group=0))
            assert any("block forever" in line for line in started[-1].stdout)
        yield f"127.0.0.1:{port}"
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)  # `ray stop` would end everybody's
            process.communicate()
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_cluster_of_two_nodes_equals_one_process_and_outlives_the_run(train, tmp_path, monkeypatch):
    one, folder = train(*MOVING, folder="one"), tmp_path / "flower"
    with ray_cluster(nodes=2) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        words = [*SMALL, *MOVING, "runtime=flower", f"output_dir={folder}", f"hydra.run.dir={folder}"]
        assert command([*words, "runtime.cpus_per_client=2"]) == 2  # two CPUs there are, but not on one node
        assert command(words) == 0
        assert [node["CPU"] for node in ray_nodes()] == [1, 1]
    assert same_bits(one.model, Run(folder).model)
    for row, twin in zip(one.rows, Run(folder).rows, strict=True):
        assert row.get("bytes_down") == twin.get("bytes_down")
    # Of two workers with a CPU each, a node has room for one.
    workers = re.findall(r"Worker (\d+) trains on cpu and keeps", (folder / "flower" / "run.log").read_text())
    assert len(set(workers)) == 2


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_says_so_and_goes_on_to_the_same_bits(train, tmp_path):
    words = ["num_rounds=8", "client.local_epochs=8"]
    one, folder = train(*words, folder="one"), tmp_path / "flower"
    command_line = [sys.executable, "-m", "fedfrozen_app", *SMALL, *words, "runtime=flower"]
    command_line += [f"output_dir={folder}", f"hydra.run.dir={folder}"]
    with subprocess.Popen(command_line, stdout=PIPE, stderr=PIPE, text=True) as process:
        workers = []
        for line in process.stdout:
            workers += map(int, re.findall(r"^Worker (\d+) trains on", line))
            if line.startswith("round 1/"):
                os.kill(workers[-1], signal.SIGKILL)
                break
        said = "".join(process.communicate())
    assert process.returncode == 1
    assert "A worker of Flower's simulation died in round" in said and "fedfrozen resume" in said
    assert all(row.get("clients_failed", 0) == 0 for row in Run(folder).rows)
    assert command(["resume", str(folder)]) == 0
    assert same_bits(one.model, Run(folder).model)


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
