"""Kits brought to life: a SuperLink and SuperNodes with TLS and node keys on loopback, by their own scripts.

One thin slice runs by default; the rest takes minutes: `pytest -m slow tests/sites/test_deployed.py`.
"""

import re
import shutil
import subprocess
import threading
import time

import pytest
import yaml
from flwr.proto.control_pb2 import ListNodesRequest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.server import control
from tests.conftest import Run
from tests.sites.federation import ROOT, SITES, Deployment, federation
from tests.sites.twin import (
    compare_with_one_process,
    join,
    largest_difference,
    same_course,
    the_same_in_process,
    words,
)

pytestmark = pytest.mark.timeout(900)  # a dozen processes that each import much: slow where a machine is busy


def same_result(one: Run, other: Run) -> None:
    assert largest_difference(one, other) <= 1e-6
    same_course(one, other)


@pytest.mark.slow
def test_two_sites_across_the_switch_equal_one_process(tmp_path):
    """The thin slice: TLS, keys, policy, each site its own folder; executors that have no network."""
    sites, rounds = SITES[:2], ("num_rounds=2", "strategy.warmup_rounds=1", "runtime.min_nodes=2")
    with federation(tmp_path / "fed", sites) as deployment:
        join(deployment, sites, network=False)
        assert command(words(deployment, tmp_path / "run", *rounds)) == 0
        for site in sites:
            log = read_audit(Kit.read(deployment.kits / site).audit)
            assert [entry["event"] for entry in log] == ["hello", "sent", "sent"]
            assert deployment.log(f"{site}-executor").count("keeps its model and data loaded") == 1
        assert deployment.server("revoke", "nobody").returncode == 2
        assert deployment.server("revoke", sites[0]).returncode == 0
        assert statuses(deployment) == ["online", "unregistered"]
    (tmp_path / "twin").mkdir()
    twin = the_same_in_process(deployment, sites, tmp_path / "twin", *rounds)
    same_result(Run(tmp_path / "run"), twin)


@pytest.mark.slow
def test_fedfrozen_and_private_safl_over_three_sites_equal_one_process(tmp_path):
    """As the script does it: `python benchmarks/deployment.py same`."""
    found = compare_with_one_process(tmp_path)
    assert found["runs"]["fedfrozen"]["difference"] <= 1e-6
    assert found["runs"]["safl, seeded noise"]["difference"] <= 1e-6
    assert 0 < found["runs"]["safl, private"]["epsilon_max"] <= 3
    assert all(set(run["clients_ok"]) == {3} for run in found["runs"].values())
    # It spent 3 of the sites' 8: a run that asks for 6 is refused, and written down, by all of them.
    assert found["refused"] == dict.fromkeys(SITES, "the run asks for epsilon 6, and 5 is left")


def statuses(deployment: Deployment) -> list[str]:
    with control(deployment.kits / "server") as client:
        return sorted(node.status for node in client.ListNodes(ListNodesRequest()).nodes_info)


@pytest.mark.slow
def test_a_bundle_without_the_policy_check_changes_nothing(tmp_path, monkeypatch):
    """The server sends code that shares everything and checks nothing; the site runs its own package."""
    sites = SITES[:2]
    app = tmp_path / "app"
    for part in ("fedfrozen_app", "strategies", "clients", "conf", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, app / part)
    target = app / "fedfrozen_app" / "client_app.py"
    target.write_text(target.read_text() + '\nraise SystemExit("the bundle\'s code ran")\n')
    policy = app / "fedfrozen_app" / "sites" / "policy.py"
    policy.write_text(re.sub(r"return f?\"[^\n]*", "return None", policy.read_text()))
    monkeypatch.setattr("fedfrozen_app.runtimes.flower.deployed.app_folder", lambda work: app)
    rounds = ("num_rounds=1", "strategy.warmup_rounds=1", "runtime.min_nodes=2", "runtime.node_timeout=30")
    with federation(tmp_path / "fed", sites) as deployment:
        join(deployment, sites)
        # No site is left to train with, which is for the person at the server to mend.
        assert command(words(deployment, tmp_path / "refused", *rounds)) == 2
        for site in sites:
            log = read_audit(Kit.read(deployment.kits / site).audit)
            assert {entry["event"] for entry in log} == {"refused"} and "the bundle" in log[0]["reason"]
            # Let every bundle in: the policy still holds, because the bundle's code does not run.
            deployment.change(site, "policy.yaml", bundles="any", upload_roles=["head"])
        assert command(words(deployment, tmp_path / "forbidden", *rounds)) == 1
        for site in sites:
            deployment.change(site, "policy.yaml", upload_roles=yaml.safe_load(ROLES))
        assert command(words(deployment, tmp_path / "run", *rounds)) == 0
    log = read_audit(Kit.read(deployment.kits / "north").audit)
    assert any("which may not leave it" in entry.get("reason", "") for entry in log)
    assert log[-1]["event"] == "sent"


ROLES = "[embedding, query, key, value, output, mlp, norm, head]"


# Killed ---------------------------------------------------------------------------------------------------


def run_in_thread(line: list[str]) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(subprocess.run(line, check=False).returncode))
    thread.start()
    return thread, codes


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["configure", "wait", "aggregate", "write"])
def test_a_server_killed_in_any_phase_of_a_round_goes_on(tmp_path, phase, monkeypatch):
    """The ServerApp kills itself with SIGKILL in the second of three rounds, once."""
    sites = SITES[:2]
    rounds = ("num_rounds=3", "strategy.warmup_rounds=1", "runtime.min_nodes=2")
    mark = tmp_path / "killed"
    monkeypatch.setenv("FEDFROZEN_TEST_KILL", f"{phase}:2:{mark}")
    app = app_with_kills(tmp_path / "app")
    monkeypatch.setattr("fedfrozen_app.runtimes.flower.deployed.app_folder", lambda work: app)
    with federation(tmp_path / "fed", sites) as deployment:
        join(deployment, sites)
        for site in sites:
            deployment.change(site, "policy.yaml", bundles="any")
        assert command(words(deployment, tmp_path / "run", *rounds)) == 1
        assert mark.exists()
        assert command(["resume", str(tmp_path / "run")]) == 0
    run = Run(tmp_path / "run")
    assert [row["round"] for row in run.rows] == [0, 1, 2, 3]
    (tmp_path / "twin").mkdir()
    twin = the_same_in_process(deployment, sites, tmp_path / "twin", *rounds)
    assert largest_difference(run, twin) <= 1e-6


KILLS = '''

import os as _os
import signal as _signal
from pathlib import Path as _Path


def _die(phase, server_round):
    """For a test: SIGKILL in this phase of this round, once."""
    wanted, number, mark = _os.environ.get("FEDFROZEN_TEST_KILL", "::").split(":", 2)
    if wanted == phase and int(number) == server_round and not _Path(mark).exists():
        _Path(mark).touch()
        _os.kill(_os.getpid(), _signal.SIGKILL)
'''


def app_with_kills(app):
    """A copy of the app whose server side dies where it is told to."""
    for part in ("fedfrozen_app", "strategies", "clients", "conf", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, app / part)
    base = app / "fedfrozen_app" / "server" / "train_round.py"
    text = base.read_text() + KILLS
    places = {
        "        nodes = federation.connection.": '        _die("configure", server_round)\n',
        "        if self.record.take(client, reply, weight):\n": '        _die("wait", self.number)\n',
        "        update = self.record.finish(": '        _die("aggregate", self.number)\n',
    }
    for line, kill in places.items():
        assert text.count(line) == 1
        text = text.replace(line, kill + line)
    base.write_text(text)
    saver = app / "fedfrozen_app" / "files" / "checkpoint.py"
    text = saver.read_text() + KILLS
    line = "    part.rename(target)\n"
    assert text.count(line) == 1
    saver.write_text(text.replace(line, f'    _die("write", checkpoint.round)\n{line}'))
    return app


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["training", "upload"])
def test_a_site_killed_in_training_or_upload_comes_back(tmp_path, phase):
    """SuperNode and executor get SIGKILL in the second round, and are started again as their units would."""
    sites = SITES[:2]
    rounds = ("num_rounds=3", "strategy.warmup_rounds=1", "runtime.min_nodes=2")
    with federation(tmp_path / "fed", sites) as deployment:
        join(deployment, sites)
        line = ["fedfrozen", *words(deployment, tmp_path / "run", *rounds, "runtime.round_timeout=400")]
        thread, codes = run_in_thread(line)
        north = Kit.read(deployment.kits / "north")
        wait_until(lambda: sent(north, 1) and receiving(deployment, "north", 2), 150)
        if phase == "upload":
            wait_until(lambda: sent(north, 2), 60)
        deployment.kill("north-supernode")
        deployment.kill("north-executor")
        deployment.restart_site("north")
        thread.join(500)
        assert codes == [0]
    run = Run(tmp_path / "run")
    assert [row["round"] for row in run.rows] == [0, 1, 2, 3]
    # It was asked again when it was back: no round is lost, and no update counts twice.
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2, 2]
    log = [entry for entry in read_audit(north.audit) if entry["event"] == "sent"]
    assert {entry["round"]: entry["arrays"] for entry in log} == {e["round"]: e["arrays"] for e in log[::-1]}
    assert [entry["round"] for entry in log] in ([1, 2, 3], [1, 2, 2, 3])
    (tmp_path / "twin").mkdir()
    twin = the_same_in_process(deployment, sites, tmp_path / "twin", *rounds)
    assert largest_difference(run, twin) <= 1e-6


def sent(kit: Kit, server_round: int) -> bool:
    return any(e["event"] == "sent" and e["round"] == server_round for e in read_audit(kit.audit))


def receiving(deployment: Deployment, site: str, server_round: int) -> bool:
    return f"ROUND {server_round}]" in deployment.log(f"{site}-supernode")


def wait_until(condition, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
