"""A real Prometheus over the server and the sites of a federation, and when its alerts fire and clear."""

import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app.runtimes.flower.processes import Children, free_port
from fedfrozen_app.sites.kit_templates import MONITORING
from tests.sites.federation import Deployment, wait_for_port

START = 300.0  # seconds for everything to show its numbers


@dataclass
class Prometheus:
    address: str
    fired: dict[str, float] = field(default_factory=dict)  # since when, on our monotonic clock

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        """ALERT{party} of all that fire now."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {name_of(alert["labels"]) for alert in alerts if alert["state"] == "firing"}

    def all_up(self) -> bool:
        """Of the first moments too, in which it does not answer yet."""
        try:
            targets = self.get("/api/v1/targets")["activeTargets"]
        except urllib.error.HTTPError:
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def wait_for(self, alert: str, *, firing: bool, patience: float) -> float | None:
        """Seconds until it fires, or no longer does; None if that takes too long."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience:
            if any(one.startswith(alert) for one in self.firing()) == firing:
                return waited
            time.sleep(0.5)
        return None


def name_of(labels: dict[str, str]) -> str:
    who = labels.get("site") or labels.get("holder") or labels.get("party", "")
    return f"{labels['alertname']}{{{who}}}"


@contextlib.contextmanager
def watched(deployment: Deployment, sites: tuple[str, ...]) -> Iterator[Prometheus]:
    """The endpoints of the server and of these sites, and a Prometheus with the kits' rules."""
    folder = deployment.folder / "prometheus"
    folder.mkdir()
    with Children(folder) as children:
        targets = {}
        for party in ("server", *sites):
            targets[party] = free_port()
            kit = str(deployment.kits / party)
            verb = "server" if party == "server" else "site"
            words = ["fedfrozen", verb, "metrics", kit, "--port", str(targets[party])]
            children.start(f"metrics-{party}", words, folder / "home")
        port = free_port()
        write_settings(folder, targets)
        words = ["--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        words += [f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        command = f"cd {folder} && exec {shutil.which('prometheus')} {' '.join(words)}"
        children.start("prometheus", ["sh", "-c", command], folder / "home")
        wait_for_port(port)
        found = Prometheus(f"http://127.0.0.1:{port}")
        until(found.all_up, START)
        yield found


def write_settings(folder: Path, targets: dict[str, int]) -> None:
    """As in the kits, with every endpoint of the federation."""
    (folder / "alerts.yml").write_text(MONITORING["alerts.yml"])
    settings = yaml.safe_load(
        MONITORING["prometheus.yml"].replace("@metrics_port", "1").replace("@name", "x")
    )
    settings["scrape_configs"][0]["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"party": party}} for party, port in targets.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))


def until(holds: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, f"not so after {patience:g} s"
        time.sleep(0.5)
