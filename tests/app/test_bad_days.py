"""Bad days of one machine: closed terminals and pipes, full disks, clocks that step, commands given twice."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.watch import make_server
from fedfrozen_app.files import status
from fedfrozen_app.report.personal import fairness_picture  # before `train` puts nothing in its place
from tests.conftest import SMALL, Run, full_disk, same_bits

ROOT = Path(__file__).resolve().parents[2]
FEDFROZEN = [sys.executable, "-m", "fedfrozen_app"]
PLAIN = [*SMALL, "track.tensorboard=false"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*words: str, **how) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
    return subprocess.Popen([*FEDFROZEN, *words], env=environment, text=True, **how)


def wait_for_rows(folder: Path, count: int, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    rows = folder / "metrics.jsonl"
    while not rows.exists() or len(rows.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# What is printed ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipe_that_closes_ends_the_printing_not_the_training(here):
    training = start(*PLAIN, "output_dir=run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    training.stdout.readline()
    training.stdout.close()  # as `| head -1`
    _, errors = training.communicate(timeout=200)
    assert training.returncode == 0, errors
    assert "make room" not in errors and "Broken" not in errors and "Traceback" not in errors
    assert Run(here / "run").summary["status"] == "completed"
    assert (here / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_stdout_that_was_never_open_or_is_full_is_no_error(here):
    for number, how in enumerate((">&-", "> /dev/full")):
        line = " ".join([*FEDFROZEN, *PLAIN, "num_rounds=1", f"output_dir=run{number}"])
        done = subprocess.run(
            ["sh", "-c", f"{line} {how}"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert "AttributeError" not in done.stderr and "Traceback" not in done.stderr
        assert Run(here / f"run{number}").summary["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "methods", "doctor"])
def test_help_into_a_pipe_that_closes_is_quiet(here, words):
    helping = start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    helping.stdout.close()
    _, errors = helping.communicate(timeout=100)
    assert "output folder" not in errors and "Broken" not in errors and "Traceback" not in errors


# Signals --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_ends_a_run_alike_and_a_second_one_spoils_nothing(here, number):
    training = start(
        *PLAIN, "num_rounds=200", "output_dir=run", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    wait_for_rows(here / "run", 3)
    training.send_signal(number)
    for _ in range(5):
        time.sleep(0.05)
        training.send_signal(number)
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 130, errors
    assert "fedfrozen resume" in errors and "Traceback" not in errors
    assert status.read(here / "run").state == "interrupted"
    run = Run(here / "run")
    assert run.summary["status"] == "interrupted" and run.summary["rounds"] == run.rows[-1]["round"]
    assert whole_page(here / "run" / "report.html") and whole_picture(here / "run" / "curves.png")


def whole_page(path: Path) -> bool:
    return path.read_text().rstrip().endswith("</html>")


def whole_picture(path: Path) -> bool:
    return path.read_bytes().endswith(b"IEND\xaeB`\x82")


# The folder -----------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(here, capsys):
    words = [*PLAIN, "num_rounds=1", "output_dir=run"]
    assert command(words) == 0
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    for again in (words, [*words, "seed=1"], [*words, "num_rounds=3"]):
        assert command(again) == 2
        told = capsys.readouterr().err
        assert "holds a run" in told and "overwrite=true" in told and "complete" in told
    assert before == {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    assert command([*words, "seed=1", "overwrite=true"]) == 0
    assert Run(here / "run").summary["seed"] == 1


@pytest.mark.slow
def test_a_run_that_stopped_is_resumed_or_overwritten_never_begun_anew_in_silence(here, capsys):
    assert command([*PLAIN, "num_rounds=1", "output_dir=run"]) == 0
    status.write(here / "run", status.replace(status.read(here / "run"), state="interrupted"))
    (here / "run" / "summary.json").unlink()
    assert command([*PLAIN, "num_rounds=1", "output_dir=run"]) == 2
    told = capsys.readouterr().err
    assert "fedfrozen resume" in told and "interrupted" in told


@pytest.mark.slow
def test_the_command_that_repeats_a_run_names_a_fresh_folder(here):
    assert command([*PLAIN, "num_rounds=1", "output_dir=run", "overwrite=true", "run_id=abc"]) == 0
    page = (here / "run" / "report.html").read_text()
    shown = page.split("<h2>To repeat it</h2>")[1].split("</pre>")[0]
    assert "output_dir=run-again" in shown and "overwrite" not in shown and "run_id" not in shown
    again = shown.split("<pre>fedfrozen ")[1].split()
    assert command(again) == 0
    assert same_bits(Run(here / "run").model, Run(here / "run-again").model)


# Clocks and owners ----------------------------------------------------------------------------------------


def test_a_clock_that_steps_forward_does_not_free_the_folder(here, monkeypatch, capsys):
    other = subprocess.Popen(["sleep", "60"])
    try:
        (here / "run").mkdir()
        held = status.new_status({}, [], owner=status.Owner.of(other.pid))
        status.write(here / "run", held)
        for step in (0, 3600, 10 * 365 * 86400, -86400):
            now = time.time()
            monkeypatch.setattr(time, "time", lambda now=now, step=step: now + step)
            assert status.read(here / "run").alive
            assert command([*PLAIN, "output_dir=run", "overwrite=true"]) == 2
            assert f"process {other.pid}" in capsys.readouterr().err
            monkeypatch.undo()
            monkeypatch.chdir(here)
    finally:
        other.kill()
        other.wait()
    assert not status.read(here / "run").alive


def test_another_process_with_the_same_number_is_not_the_owner(here):
    mine = status.Owner.of(os.getpid())
    assert mine.alive
    assert not status.replace(mine, began=mine.began - 1).alive  # the number was given out again
    assert not status.replace(mine, boot="another").alive  # the machine was started since


def test_a_process_that_has_ended_and_is_not_buried_owns_nothing():
    """Flower's SuperExec does not ask how its ServerApps ended: killed ones stay in the table as zombies."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = status.Owner.of(child.pid)
    assert owner.alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not asked how
    assert not owner.alive
    child.wait()


# Disks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_sentence(here, small_disk):
    (small_disk / "ballast").write_bytes(b"0" * 3_000_000)
    training = start(
        *SMALL, f"output_dir={small_disk}/run", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, errors = training.communicate(timeout=200)
    assert training.returncode == 1
    lines = errors.strip().splitlines()
    assert "could not be written" in lines[-1] and "make room" in lines[-1]
    assert "Traceback" not in errors and len(lines) < 20, errors
    told = status.read(small_disk / "run")
    assert told.state == "failed" and "\n" not in told.reason and len(told.reason) < 600
    for path in (small_disk / "run").rglob("*"):
        assert not (path.is_file() and path.suffix in (".png", ".html", ".json") and not path.stat().st_size)
    (small_disk / "ballast").unlink()
    words = ("resume", f"{small_disk}/run") if any((small_disk / "run" / "checkpoints").iterdir()) else None
    if words:
        again = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, errors = again.communicate(timeout=200)
        assert again.returncode == 0, errors


def test_what_went_wrong_is_a_sentence_in_the_status_file_not_a_log(tmp_path):
    with (
        pytest.raises(RuntimeError),
        status.recorded(tmp_path, {}, []),
    ):
        raise RuntimeError("The Flower run failed: no reason.\n" + "\n".join(f"line {n}" for n in range(400)))
    reason = status.read(tmp_path).reason
    assert reason == "RuntimeError: The Flower run failed: no reason."
    with pytest.raises(RuntimeError), status.recorded(tmp_path, {}, []):
        raise RuntimeError("long " * 1000)
    assert len(status.read(tmp_path).reason) <= 500


@pytest.mark.slow
def test_an_export_is_whole_or_as_it_was_and_others_can_read_it(train, tmp_path, capsys):
    first = train("num_rounds=1", folder="first")
    second = train("num_rounds=1", "model.config.hidden_size=32", folder="second")
    target = tmp_path / "exported"
    before = os.umask(0o022)
    try:
        assert command(["export", str(first.folder), str(target)]) == 0
        files = {path.name: path.read_bytes() for path in target.iterdir()}
        assert {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()} == {0o644}
        assert stat.S_IMODE(target.stat().st_mode) == 0o755
        with full_disk(6_000):  # the new configuration fits, the new weights do not
            assert command(["export", str(second.folder), str(target)]) == 2
        assert "cannot be written" in capsys.readouterr().err
        assert files == {path.name: path.read_bytes() for path in target.iterdir()}
        with full_disk(6_000):
            assert command(["export", str(second.folder), str(tmp_path / "fresh")]) == 2
        assert not (tmp_path / "fresh").exists()
        assert command(["export", str(second.folder), str(target)]) == 0
        assert json.loads((target / "config.json").read_text())["hidden_size"] == 32
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        (target / "notes.txt").write_text("mine")
        assert command(["export", str(first.folder), str(target)]) == 2
        assert "notes.txt" in capsys.readouterr().err and (target / "notes.txt").read_text() == "mine"
    finally:
        os.umask(before)


@pytest.mark.slow
def test_pictures_and_pages_are_whole_or_absent(train, tmp_path):
    from fedfrozen_app.report.curves import write_curves
    from fedfrozen_app.report.label_picture import label_picture
    from fedfrozen_app.report.run_page import write_report

    run = train("num_rounds=1")
    rows = run.rows
    counts = __import__("numpy").ones((3, 10), dtype=int)
    for name, write in {
        "curves.png": lambda path: write_curves(rows, path, title="t"),
        "labels.png": lambda path: label_picture(counts, list("abcdefghij"), ("0", "1", "2"), path),
        "fairness.png": lambda path: fairness_picture({"a": [0.1, 0.2]}, path),
        "report.html": lambda path: write_report(path.parent),
    }.items():
        path = run.folder / name
        path.unlink(missing_ok=True)
        with full_disk(500), pytest.raises(OSError):
            write(path)
        assert not path.exists(), name
        path.write_text("before")
        with full_disk(500), pytest.raises(OSError):
            write(path)
        assert path.read_bytes() == b"before", name
        write(path)
        assert path.stat().st_size > 500
    assert not [path for path in run.folder.iterdir() if path.name.endswith(".part")]


# The page -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["[", "[::1", "]", "127.0.0.1:notaport", "//", "a@[b"])
def test_a_malformed_host_is_refused_without_a_traceback(tmp_path, capfd, host):
    import threading

    with make_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as line:
            line.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = line.makefile("rb").read()
        server.shutdown()
    if host != "127.0.0.1:notaport":
        assert answer.split()[1] in (b"400", b"403"), answer
    assert "Traceback" not in capfd.readouterr().err


# Data -----------------------------------------------------------------------------------------------------


def test_the_server_s_folder_of_test_data_is_the_test_set(tmp_path):
    """Sites train on their own rows: what the server has is there to judge by."""
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.data.federated import load_corpus, server_only
    from tests.sites.federation import write_data

    write_data(tmp_path, tmp_path / "kits", ("a", "b"), rows=60)
    shutil.rmtree(tmp_path / "server" / "train")
    folder = tmp_path / "server" / "test"
    count = len(list(folder.rglob("*.png")))
    words = ["dataset=images", f"dataset.path={folder}", "runtime=deployed"]
    for validation in (0.0, 0.1):
        config = read(resolved(compose_config([*words, f"dataset.validation={validation}"])))
        corpus = load_corpus(config)
        held = len(server_only(corpus, config).validation)
        assert len(corpus.test) + held == count  # no row serves both, and none is left out
        assert abs(held - validation * count) <= 10
