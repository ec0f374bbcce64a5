"""Runs, sweeps and a server on real file systems of a few hundred kilobytes, which are then enlarged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfrozen_app.files import status
from tests.conftest import Run, same_bits
from tests.files.damage import TINY
from tests.sites.federation import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOM = "64m"


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a file system of this size, or enlarges it."""
    place = tmp_path / "disk"
    place.mkdir()

    def size(words: str) -> Path:
        how = "remount," if place.is_mount() else ""
        line = ["mount", "-t", "tmpfs", "-o", f"{how}size={words}", "none", str(place)]
        if subprocess.run(line, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system is not permitted here")
        return place

    yield size
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def do(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
    line = [sys.executable, "-m", "fedfrozen_app", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


def is_one_sentence(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "No space left on device" in done.stderr and "room" in done.stderr, done.stderr


@pytest.mark.parametrize("size", ["16k", "64k", "160k", "320k"])
def test_a_run(disk, tmp_path, size):
    words = [*TINY, f"output_dir={disk(size)}/run"]
    folder = Path(words[-1].partition("=")[2])
    done = do(*words)
    is_one_sentence(done)
    if (known := status.read(folder)) is not None:
        assert known.state == "failed", known
    disk(ROOM)
    again = do("resume", str(folder)) if "fedfrozen resume" in done.stderr else do(*words)
    assert again.returncode == 0, again.stderr
    assert do(*TINY, f"output_dir={tmp_path}/whole").returncode == 0
    assert same_bits(Run(folder).model, Run(tmp_path / "whole").model)


@pytest.mark.parametrize("size", ["32k", "448k"])
def test_a_sweep(disk, size):
    words = ["-m", *TINY, "seed=0,1", f"output_dir={disk(size)}/sweep"]
    is_one_sentence(do(*words))
    disk(ROOM)
    again = do(*words)
    assert again.returncode == 0, again.stderr
    folder = Path(words[-1].partition("=")[2])
    assert sorted(path.name for path in folder.iterdir() if path.name.isdigit()) == ["0", "1"]


@pytest.mark.parametrize("size", ["256k", "4m"])
def test_a_server(disk, size):
    """Flower's own processes have their files there too."""
    words = [*TINY, "runtime=flower", f"output_dir={disk(size)}/run"]
    done = do(*words)
    assert done.returncode in (0, 1, 2), done.stderr
    disk(ROOM)
    folder = Path(words[-1].partition("=")[2])
    if done.returncode:
        assert "No space left on device" in done.stderr + done.stdout, done.stderr
        assert "Traceback" not in done.stderr and "overrides" not in done.stderr, done.stderr
        again = do("resume", str(folder)) if "fedfrozen resume" in done.stderr else do(*words)
        assert again.returncode == 0, again.stderr
    assert status.read(folder).state == "complete"
