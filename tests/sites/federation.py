"""A real federation from provisioned kits on loopback: TLS, node keys, executors, each site its own data."""

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from fedfrozen_app.runtimes.flower.processes import Children, flower_environment, free_port
from fedfrozen_app.sites.federation_plan import read_federation
from fedfrozen_app.sites.kit_writer import write_kits

SITES = ("north", "south", "west")
PATIENCE = 600.0  # seconds for a process to start: on a busy machine imports take minutes
ROOT = Path(__file__).resolve().parents[2]
# What the steward of each site has written: its pictures of digits, and a policy that answers by itself.
VIEWS = {"main": {"kind": "images", "path": "data", "classes": [str(digit) for digit in range(10)]}}
OPEN = {"min_examples": 10, "min_people": 10, "approval": "policy", "metrics": True, "max_delta": 1e-4}


@dataclass
class Deployment:
    folder: Path
    children: Children
    port: int  # what the sites reach
    internal: int
    started: dict[str, int] = field(default_factory=dict)

    @property
    def kits(self) -> Path:
        return self.folder / "kits"

    def start(self, party: str, script: str, *within: str) -> int:
        """Start a kit's own script, by another command if one is given; its pid. Log: PARTY-SCRIPT.log."""
        kit = self.kits / party
        name = f"{party}-{script}"
        self.children.start(name, [*within, "sh", str(kit / f"{script}.sh")], kit / "flwr")
        self.started[name] = self.children.pid(name)
        return self.started[name]

    def start_site(self, site: str, *, network: bool = True) -> None:
        """Without a network the executor is what `PrivateNetwork=yes` makes it, where the system lets us."""
        self.start(site, "supernode")
        self.start(site, "executor", *(() if network or not may_unshare() else NO_NETWORK))

    def restart_site(self, site: str, patience: float = PATIENCE) -> None:
        """Bring a killed site back. Its SuperNode is refused until the old activation has lapsed, and its
        watchdog tries again until then."""
        self.start(site, "supernode")
        self.wait_for_line(f"{site}-supernode", "SuperNode ID", timeout=patience)
        self.start(site, "executor")

    def kill(self, name: str) -> None:
        """SIGKILL a process and all that it started."""
        self.children.kill(name, signal.SIGKILL)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", errors="replace")

    def wait_for_line(self, name: str, text: str, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.log(name):
            if time.monotonic() > deadline:
                raise AssertionError(f"no '{text}' in {name}:\n{self.log(name)[-3000:]}")
            time.sleep(0.1)

    def server(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`fedfrozen server VERB KIT ...` to its end."""
        kit = self.kits / "server"
        return subprocess.run(
            ["fedfrozen", "server", verb, str(kit), *words],
            env=flower_environment(kit / "flwr"),
            capture_output=True,
            text=True,
            check=False,
        )

    def change(self, site: str, file: str, **values: object) -> None:
        path = self.kits / site / file
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


NO_NETWORK = ("unshare", "--net")


@functools.cache
def may_unshare() -> bool:
    if shutil.which(NO_NETWORK[0]) is None:
        return False
    return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def our_command(folder: Path) -> Iterator[None]:
    """`fedfrozen` is this checkout's, whatever is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "fedfrozen"
    path = f"{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"  # and what the test has put on Python's path
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} -m fedfrozen_app "$@"\n')
    script.chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def wait_for_socket(path: Path, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never made"
        time.sleep(0.05)


def wait_for_port(port: int, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextmanager
def federation(folder: Path, sites: Sequence[str] = SITES) -> Iterator[Deployment]:
    """Provision, bring the server and its proxy up and admit the sites; start those with `start_site`."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed, and it is the only door to a server")
    folder.mkdir(parents=True, exist_ok=True)
    public, internal = free_port(), free_port()
    server = {"address": "127.0.0.1", "port": public, "internal_port": internal}
    (folder / "federation.yaml").write_text(yaml.safe_dump({"server": server, "sites": list(sites)}))
    write_kits(read_federation(folder / "federation.yaml"), folder / "kits")
    with our_command(folder / "bin"), Children(folder) as children:
        deployment = Deployment(folder, children, public, internal)
        deployment.start("server", "superlink")
        wait_for_socket(folder / "kits" / "server" / "run" / "superlink.sock")
        deployment.start("server", "proxy")
        wait_for_port(public)
        deployment.start("server", "superexec")
        done = deployment.server("admit")
        assert done.returncode == 0, done.stdout + done.stderr
        yield deployment


def write_data(folder: Path, kits: Path, sites: Sequence[str], rows: int = 450) -> None:
    """Digits as pictures: each site has its own folder, with mostly its own classes; the server tests."""
    pixels, labels = load_digits(return_X_y=True)
    for number in range(rows + 150):
        if number >= rows:
            target = folder / "server" / "test" / str(labels[number])
        else:
            home = labels[number] % len(sites) if number % 4 else number % len(sites)
            target = kits / sites[home] / "data" / str(labels[number])
        target.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels[number].reshape(8, 8) * 15).astype(np.uint8))
        image.save(target / f"{number}.png")
    # The server reads its class order and normalisation from a few rows of its own.
    shutil.copytree(folder / "server" / "test", folder / "server" / "train")
