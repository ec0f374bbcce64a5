"""Bad days of a deployed run, on real processes: kits, TLS, node keys, executors, the real command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfrozen_app.files import lease, status
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.sign import last_sign
from tests.conftest import Run, same_bits
from tests.sites.federation import ROOT, SITES, Deployment, federation
from tests.sites.twin import join, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
TWO = SITES[:2]
STRATEGIES = ["fedavg", "fedprox", "fedfrozen", "safl"]
LONG = ("num_rounds=60", "strategy.warmup_rounds=2", "runtime.min_nodes=2", "runtime.node_timeout=90")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    with federation(tmp_path_factory.mktemp("fed"), TWO) as deployment:
        join(deployment, TWO)
        yield deployment


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fedfrozen_app", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*arguments: str, timeout: float = 600) -> tuple[int, str]:
    process = start(*arguments)
    told, _ = process.communicate(timeout=timeout)
    return process.returncode, told


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen | None = None, timeout: float = 180):
    deadline = time.monotonic() + timeout
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)


def wait_for_output(process: subprocess.Popen, text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout)


def is_whole(folder: Path, state: str) -> None:
    run = Run(folder)
    assert status.read(folder).state == state
    assert run.summary["status"] == state and run.summary["rounds"] == run.rows[-1]["round"]
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    assert (folder / "curves.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert lease.holder(folder) is None
    rounds = [row["round"] for row in run.rows]
    assert rounds == sorted(set(rounds))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_ends_a_deployed_run_alike_and_the_sites_answer_the_next(deployment, tmp_path, number):
    folder = tmp_path / "run"
    training = start(*words(deployment, folder, *LONG))
    wait_for_rows(folder, 3, training)
    training.send_signal(number)
    told, _ = training.communicate(timeout=120)
    assert training.returncode == 130, told
    assert "Traceback" not in told
    is_whole(folder, "interrupted")
    done = Run(folder).rows[-1]["round"]
    code, told = finish("resume", str(folder), f"num_rounds={done + 2}")
    assert code == 0, told
    is_whole_after(folder, done + 2)


def is_whole_after(folder: Path, rounds: int) -> None:
    run = Run(folder)
    assert [row["round"] for row in run.rows] == list(range(rounds + 1))
    assert all(row["clients_failed"] == 0 for row in run.rows[1:]), [r.get("failures") for r in run.rows]
    assert status.read(folder).state == "complete"


def test_resume_finds_a_run_that_still_goes_and_attach_watches_or_stops_it(deployment, tmp_path):
    """The command is killed, as a closed laptop would: Flower's run goes on."""
    folder = tmp_path / "run"
    training = start(*words(deployment, folder, *LONG))
    wait_for_rows(folder, 2, training)
    training.kill()
    training.communicate()
    code, told = finish("resume", str(folder))
    assert code == 2 and "still going" in told and "fedfrozen attach" in told and "--stop" in told
    code, told = finish(*words(deployment, folder, *LONG, "overwrite=true"))
    assert code == 2 and "is being run by process" in told and "fedfrozen attach" in told

    watching = start("attach", str(folder))
    wait_for_output(watching, "round 1/60")
    watching.send_signal(signal.SIGINT)
    told, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0 and "goes on" in told, told
    now = len(Run(folder).rows)
    wait_for_rows(folder, now + 1)  # it does

    watching = start("attach", str(folder), "--on-interrupt", "stop")
    wait_for_output(watching, "round 1/60")
    watching.send_signal(signal.SIGINT)
    told, _ = watching.communicate(timeout=120)
    assert watching.returncode == 130, told
    is_whole(folder, "interrupted")
    code, told = finish("attach", str(folder))
    assert code == 2 and "has ended (interrupted)" in told
    done = Run(folder).rows[-1]["round"]
    code, told = finish("resume", str(folder), f"num_rounds={done + 1}")
    assert code == 0, told
    is_whole_after(folder, done + 1)


def test_a_detached_run_goes_on_by_itself_and_tells_how_it_ended(deployment, tmp_path):
    folder = tmp_path / "run"
    short = (*LONG, "num_rounds=4", "strategy.warmup_rounds=2")
    code, told = finish(*words(deployment, folder, *short), "--detach")
    assert code == 0 and "fedfrozen attach" in told, told
    deadline = time.monotonic() + 180
    while status.read(folder).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    is_whole_after(folder, 4)
    code, told = finish("num_rounds=1", f"output_dir={tmp_path}/other", "--detach")
    assert code == 2 and "runtime=deployed" in told

    folder = tmp_path / "second"
    code, told = finish(*words(deployment, folder, *LONG), "--detach")
    wait_for_rows(folder, 3)
    code, told = finish("attach", str(folder), "--stop")
    assert code == 0, told
    is_whole(folder, "interrupted")


def test_stop_first_then_resume_in_one_command_with_the_bits_of_the_unbroken(deployment, tmp_path):
    rounds = (*LONG, "num_rounds=8")
    code, told = finish(*words(deployment, tmp_path / "whole", *rounds))
    assert code == 0, told
    training = start(*words(deployment, tmp_path / "run", *rounds))
    wait_for_rows(tmp_path / "run", 4, training)
    training.kill()
    training.communicate()
    code, told = finish("resume", str(tmp_path / "run"), "--stop")
    assert code == 0, told
    is_whole_after(tmp_path / "run", 8)
    assert same_bits(Run(tmp_path / "whole").model, Run(tmp_path / "run").model)


def test_sites_that_all_refuse_end_the_run(deployment, tmp_path):
    """First the run itself, which then never begins; then its orders, once the day's updates are used up."""

    def sent_by(site: str) -> int:
        return AuditLog(Kit.read(deployment.kits / site).audit).today("sent")

    for site in TWO:
        deployment.change(site, "policy.yaml", strategies=["safl"])
    try:
        short = ("num_rounds=30", "runtime.node_timeout=20")
        code, told = finish(*words(deployment, tmp_path / "refused", *LONG, *short))
        assert code == 2 and "Only 0 of 2 nodes appeared within 20 s" in told, told
        for site in TWO:
            assert f"The site {site}: the site {site} refused; its own log says why" in told, told
        assert "not one of those that it allows" not in told  # the reason is the site's own
        assert "the strategy fedfrozen is not one of those that it allows" in deployment.log("north-executor")

        for site in TWO:
            deployment.change(site, "policy.yaml", strategies=STRATEGIES, rounds_per_day=sent_by(site) + 1)
        folder = tmp_path / "run"
        code, told = finish(*words(deployment, folder, *LONG, "num_rounds=30"))
        assert code == 1, told
        assert "No client took part in the last 2 rounds" in told and "north" in told, told
        assert len(Run(folder).rows) <= 4  # the first state, the day's only round, and two more
        assert len(status.read(folder).reason) <= 500
    finally:
        for site in TWO:
            deployment.change(site, "policy.yaml", strategies=STRATEGIES, rounds_per_day=1000)


def test_a_mute_site_is_named_waited_for_once_and_done_without(deployment, tmp_path):
    """Its SuperNode is connected; its executor hangs. Three are asked for, then two suffice."""
    deployment.children.kill("south-executor", signal.SIGKILL)
    try:
        began = time.monotonic()
        patience = ("runtime.node_timeout=60", "runtime.min_nodes=2")
        code, told = finish(*words(deployment, tmp_path / "run", *LONG, *patience))
        took = time.monotonic() - began
        assert code == 2, told
        assert "Only 1 of 2 nodes appeared within 60 s" in told
        assert re.search(r"The site south: it is connected, and does not answer", told), told
        assert took < 60 + 55, took  # once, and the time that processes take to start
        patience = ("runtime.node_timeout=15", "runtime.min_nodes=1", "num_rounds=3")
        code, told = finish(*words(deployment, tmp_path / "one", *LONG, *patience))
        assert code == 0, told
        seconds = [row["seconds"]["total"] for row in Run(tmp_path / "one").rows[1:]]
        assert max(seconds[1:]) < 15, seconds  # later rounds do not wait for it
    finally:
        deployment.start("south", "executor")


@pytest.fixture
def impatient(deployment) -> Iterator[Deployment]:
    """The site south notices within seconds what hangs."""
    for part in ("executor", "supernode"):
        deployment.children.kill(f"south-{part}", signal.SIGKILL)
    deployment.change("south", "site.yaml", limits={"transfer": 20, "idle": 8, "training": 300})
    deployment.restart_site("south")
    yield deployment


def wait_for_log(deployment: Deployment, name: str, text: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 400
    while text not in deployment.log(name):
        assert time.monotonic() < deadline and process.poll() is None, deployment.log(name)[-2000:]
        time.sleep(0.2)


def test_training_that_hangs_is_ended_and_done_again(impatient, tmp_path):
    """A picture of the site's lies on a disk that does not answer, until it does."""
    rounds = (*LONG, "num_rounds=3", "runtime.round_timeout=300")
    code, told = finish(*words(impatient, tmp_path / "whole", *rounds))
    assert code == 0, told
    impatient.children.kill("south-executor", signal.SIGKILL)
    picture = next((impatient.kits / "south" / "data").glob("*/*.png"))
    content = picture.read_bytes()
    picture.unlink()
    os.mkfifo(picture)
    try:
        impatient.start("south", "executor")
        training = start(*words(impatient, tmp_path / "run", *rounds))
        wait_for_log(impatient, "south-executor", "hangs (working, and has not computed for", training)
    finally:
        picture.unlink()
        picture.write_bytes(content)
    told, _ = training.communicate(timeout=600)
    assert training.returncode == 0, told
    is_whole_after(tmp_path / "run", 3)
    assert same_bits(Run(tmp_path / "whole").model, Run(tmp_path / "run").model)


@pytest.mark.parametrize("part", ["executor", "supernode"])
def test_a_process_that_stands_still_for_good_is_started_again(impatient, tmp_path, part):
    rounds = (*LONG, "num_rounds=6", "runtime.round_timeout=300")
    code, told = finish(*words(impatient, tmp_path / "whole", *rounds))
    assert code == 0, told
    training = start(*words(impatient, tmp_path / "run", *rounds))
    wait_for_rows(tmp_path / "run", 3, training)
    sign = last_sign(impatient.kits / "south" / "run", part)
    os.kill(sign.pid, signal.SIGSTOP)
    told, _ = training.communicate(timeout=600)
    assert training.returncode == 0, told
    assert f"The {part} hangs" in impatient.log(f"south-{part}")
    is_whole_after(tmp_path / "run", 6)
    assert same_bits(Run(tmp_path / "whole").model, Run(tmp_path / "run").model)


def test_a_folder_that_holds_a_deployed_run_is_refused(deployment, tmp_path):
    rounds = (*LONG, "num_rounds=2", "strategy.warmup_rounds=1")
    code, told = finish(*words(deployment, tmp_path / "run", *rounds))
    assert code == 0, told
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    code, told = finish(*words(deployment, tmp_path / "run", *rounds, "seed=1"))
    assert code == 2 and "holds a run already" in told
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    command = json.loads((tmp_path / "run" / "summary.json").read_text())["command"]
    assert "output_dir" in command
    page = (tmp_path / "run" / "report.html").read_text().split("<h2>To repeat it</h2>")[1]
    assert "run-again" in page.split("</pre>")[0]
