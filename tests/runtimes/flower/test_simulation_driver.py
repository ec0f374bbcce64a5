"""Runs of a toy Flower app, in simulation and deployed: how they end, what they leave behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedfrozen_app
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.app_folder import APP_TABLES, app_folder
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.runtimes.flower import deployed as deployed_runtime
from fedfrozen_app.runtimes.flower import simulation
from fedfrozen_app.runtimes.flower.processes import Children, SimulationFailed, executable, flower_environment
from fedfrozen_app.runtimes.flower.run_log import RunEnd, failure, show
from fedfrozen_app.runtimes.flower.simulation import run_app
from fedfrozen_app.runtimes.flower.superlink_connection import toml_scalars
from tests.server.federation import deployed

CHECKOUT = Path(fedfrozen_app.__file__).parents[1]

PROJECT = """
[project]
name = "toy"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["a-package-that-nobody-has-published"]

[tool.flwr.app]
publisher = "toy"
fab-include = ["toy.py"]

[tool.flwr.app.components]
serverapp = "toy:server"
clientapp = "toy:client"

[tool.flwr.app.config]
mode = "train"
result = ""
"""

# Every node adds its number plus one, so that the mean over nodes 0 and 1 grows by 1.5.
TOY = """
import json
import logging
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    (array,) = message.content["arrays"].to_numpy_ndarrays()
    arrays = ArrayRecord([array + context.node_config["partition-id"] + 1])
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    if context.run_config["mode"] == "fail":
        raise ValueError("the toy broke on purpose")
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(10)]), num_rounds=1)
    (array,) = result.arrays.to_numpy_ndarrays()
    logging.getLogger("toy").warning("the toy has a result")
    Path(context.run_config["result"]).write_text(json.dumps(array.tolist()))
    while context.run_config["mode"] == "hang":
        time.sleep(1)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "toy.py").write_text(TOY)
    return folder


# --- simulation --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_completes_and_its_log_arrives_line_by_line(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody listens there: the run can only complete if no request on loopback goes to the proxy.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    result = tmp_path / 'a "quoted" \\ folder' / "result.json"
    result.parent.mkdir()
    lines: list[str] = []

    run_app(
        toy,
        {"result": str(result)},
        num_supernodes=2,
        work_dir=tmp_path / "work",
        on_line=lines.append,
    )

    assert json.loads(result.read_text()) == [1.5] * 10
    assert "the toy has a result" in lines
    assert any("[ROUND 1/1]" in line for line in lines)
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert (tmp_path / "work" / "run.log").read_text().splitlines() == lines


@pytest.mark.slow
def test_a_failed_run_raises_with_the_exception_in_its_text(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(SimulationFailed) as caught:
        run_app(toy, {"mode": "fail"}, num_supernodes=2, work_dir=tmp_path)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("The Flower run failed: ")
    assert "ValueError: the toy broke on purpose" in rest


@pytest.mark.parametrize("kind", [UserError, RunFailed])
def test_what_our_serverapp_says_in_a_sentence_stays_one(kind: type[Exception]) -> None:
    said = "Only 0 of 2 nodes appeared: start the others."
    log = ["Traceback (most recent call last):", f"fedfrozen_app.core.errors.{kind.__name__}: {said}", "Exit"]
    end = RunEnd("failed", f"ServerApp failed with exception: {said}", log)
    found = failure(end, "Go on.")
    assert type(found) is kind and str(found) == said
    # One that was handled on the way to another is not how it ended.
    other = failure(replace(end, details="another"), "Go on.")
    assert type(other) is SimulationFailed and str(other).startswith("The Flower run failed: another\nTrace")
    assert str(other).endswith("Exit\nGo on.")


@pytest.mark.slow
def test_an_app_that_flower_refuses_is_refused_here_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace('serverapp = "toy:server"', ""))
    with pytest.raises(SimulationFailed, match="serverapp"):
        run_app(tmp_path, {}, num_supernodes=2, work_dir=tmp_path / "work")


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus"), [(0, 1, 0), (2, 0, 0), (2, 10_000, 0), (2, 1, -1), (2, 1, 999)]
)
def test_impossible_resources_are_refused_before_anything_starts(
    tmp_path: Path, nodes: int, cpus: float, gpus: float
) -> None:
    with pytest.raises(UserError):
        run_app(
            tmp_path,
            {},
            num_supernodes=nodes,
            cpus_per_client=cpus,
            gpus_per_client=gpus,
            work_dir=tmp_path / "work",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-address"])
@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(simulation, "CLUSTER_PATIENCE", 3)
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address}"):
        run_app(tmp_path, {}, num_supernodes=2, work_dir=tmp_path / "work")


def test_a_run_joins_a_cluster_only_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert flower_environment(tmp_path)["RAY_ADDRESS"] == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert flower_environment(tmp_path)["RAY_ADDRESS"] == "10.0.0.1:6379"


def test_what_workers_of_other_machines_say_is_shown_as_what_those_here_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for where in ("pid=7", "pid=8, ip=10.0.0.2"):
        show(f"(ClientAppActor {where}) INFO :      of Flower")
        show(f"(ClientAppActor {where}) Worker 7 trains on cpu and keeps its model and data loaded.")
    show("(raylet, ip=10.0.0.2) of Ray")
    assert capsys.readouterr().out == 2 * "Worker 7 trains on cpu and keeps its model and data loaded.\n"


def test_an_error_of_our_own_is_shown_once_and_without_flower_s_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = "runs/1 could not be written: make room there, then go on with: fedfrozen resume runs/1"
    lines = ["ERROR :     ServerApp raised an exception", "Traceback (most recent call last):"]
    lines += [f"fedfrozen_app.core.errors.RunFailed: {sentence}", "ERROR :     Exit Code: 201"]
    lines += ["An unhandled exception occurred in the ServerApp.", "For more information, visit: <page>"]
    for line in lines:
        show(line)
    assert capsys.readouterr().out == ""
    assert str(failure(RunEnd("failed", f"Server: {sentence}", lines))) == sentence
    bug = ['  File "app.py", line 1, in main', "ZeroDivisionError: division by zero"]
    for line in bug:
        show(line)
    assert capsys.readouterr().out.splitlines() == bug


def test_a_report_that_a_full_disk_prevents_hides_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "curves.png"))

    monkeypatch.setattr(deployed_runtime, "write_interrupted", full)
    deployed_runtime.leave_report(compose_run(["device=cpu"]).config, tmp_path, "failed")
    assert "could not be written" in caplog.text and "No space left" in caplog.text


def processes() -> dict[int, tuple[int, int, str]]:
    """Parent, group and command line of every process that has not ended (a zombie has)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if state != "Z":
            found[int(folder.name)] = (int(parent), int(group), command)
    return found


def groups_below(root: int) -> set[int]:
    """The process groups of all descendants."""
    table = processes()
    family: set[int] = {root}
    groups: set[int] = set()
    while True:
        more = {pid for pid, (parent, _, _) in table.items() if parent in family} - family
        if not more:
            return groups
        family |= more
        groups |= {table[pid][1] for pid in more}


def members(groups: set[int]) -> list[str]:
    return [command for _, group, command in processes().values() if group in groups]


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_no_process_survives_an_interrupted_run(
    toy: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    result = tmp_path / "result.json"
    script = (
        "from pathlib import Path\n"
        "from fedfrozen_app.runtimes.flower.simulation import run_app\n"
        f"run_app(Path({str(toy)!r}), {{'mode': 'hang', 'result': {str(result)!r}}},\n"
        f"        num_supernodes=2, work_dir=Path({str(tmp_path)!r}))\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        process_group=0,
    )
    groups = {driver.pid}
    try:
        while not result.exists():  # the test's own time-out ends this
            assert driver.poll() is None
            time.sleep(0.1)
        groups |= groups_below(driver.pid)
        running = " ".join(members(groups))
        assert all(name in running for name in ("patient_superlink", "flwr-simulation", "raylet"))

        driver.send_signal(number)
        driver.wait(timeout=20)
        assert driver.returncode == code
        deadline = time.monotonic() + 5  # a killed process needs a moment to be gone
        while members(groups) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert members(groups) == []
    finally:
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue


# --- deployed ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_app_runs_on_two_deployed_nodes(toy: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    nodes = [{"partition-id": number, "num-partitions": 2} for number in range(2)]
    with deployed(tmp_path, nodes) as federation:
        end = federation.run(toy, {"result": str(result)}, timeout=120)
        assert end.status == "completed"
        assert "the toy has a result" in end.log
        assert json.loads(result.read_text()) == [1.5] * 10

        with pytest.raises(SimulationFailed, match="the toy broke on purpose") as caught:
            federation.run(toy, {"mode": "fail"}, timeout=120)
        assert "--- supernode_1" in str(caught.value)


# --- children ----------------------------------------------------------------------------------


@needs_proc
def test_children_end_with_all_that_they_started_even_if_they_refuse(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; while :; do sleep 0.1; done) & echo $!; wait"
    children = Children(tmp_path)
    children.start("stubborn", ["bash", "-c", stubborn], tmp_path / "home")
    while not (text := (tmp_path / "stubborn.log").read_text().strip()):
        time.sleep(0.01)
    children.end(grace=0.2)
    deadline = time.monotonic() + 5
    while int(text) in processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(text) not in processes()


def test_a_child_that_ends_early_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("short", ["bash", "-c", "echo no port left; exit 3"], tmp_path / "home")
        with pytest.raises(SimulationFailed, match=r"exit code 3.\n--- short\nno port left"):
            while True:
                children.check()
                time.sleep(0.01)


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with Children(tmp_path) as children, pytest.raises(UserError, match="flower-nosuch"):
        children.start("nosuch", ["flower-nosuch"], tmp_path / "home")


# --- run configuration and app folder ----------------------------------------------------------

SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), SCALARS))
def test_toml_gives_back_what_was_written(values: dict[str, str | int | float | bool]) -> None:
    back = tomllib.loads(toml_scalars(values))
    assert back == values
    assert {key: type(value) for key, value in back.items()} == {
        key: type(value) for key, value in values.items()
    }


def test_a_checkout_is_its_own_app_folder(tmp_path: Path) -> None:
    assert app_folder(tmp_path) == CHECKOUT
    assert list(tmp_path.iterdir()) == []


def test_the_generated_tables_are_those_of_the_checkout() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert tomllib.loads(APP_TABLES)["tool"]["flwr"] == project["tool"]["flwr"]


def test_an_installed_wheel_assembles_a_folder_that_flower_bundles(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("fedfrozen_app", "strategies", "clients"):
        shutil.copytree(CHECKOUT / name, source / name)
        (source / name / "__init__.py").touch()
    (source / "conf" / "strategy").mkdir(parents=True)
    (source / "conf" / "strategy" / "fedavg.yaml").write_text("name: fedavg\n")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(CHECKOUT / name, source / name)
    (source / "README.md").touch()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for name in ("fedfrozen_app", "strategies", "clients"):
        assert (tmp_path / "site" / name / "py.typed").is_file()  # type checkers of users read our types

    script = "import sys, pathlib; from fedfrozen_app.core.app_folder import app_folder as f\n"
    script += "print(f(pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "work")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "work" / "app"

    build = [executable("flwr"), "build", "--app", str(folder)]
    env = flower_environment(tmp_path / "home")
    subprocess.run(build, cwd=tmp_path, env=env, check=True, capture_output=True)
    (bundle,) = tmp_path.glob("*.fab")
    names = set(zipfile.ZipFile(bundle).namelist())
    assert {"conf/strategy/fedavg.yaml", "fedfrozen_app/runtimes/flower/simulation.py"} <= names
    assert {"strategies/__init__.py", "clients/__init__.py", "pyproject.toml"} <= names
    assert "fedfrozen_app/conf/strategy/fedavg.yaml" not in names
