"""Sites in this process: real kits, executors, policies and bytes; only Flower's processes are left out."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from flwr.app import Message
from flwr.serverapp import Grid

from fedfrozen_app import client_app
from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, server_only
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server_app import gather, open_connection
from fedfrozen_app.sites import provision
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.request_handler import RequestHandler
from tests.conftest import SMALL, Run
from tests.sites.federation import OPEN, VIEWS, write_data

BUNDLE = "b" * 64
TINY = [word for word in SMALL if not word.startswith(("num_clients", "dataset", "partition"))]


@dataclass
class Sites:
    """Three kits with data, and a server's folder beside them."""

    folder: Path
    names: Sequence[str] = ("north", "south", "west")
    executors: dict[str, RequestHandler] = field(default_factory=dict)
    settings: Sequence[str] = tuple(TINY)  # of every run
    flower_run: int = 0
    rows: int = 240  # of all sites together
    runtime: str = "deployed"

    def prepare(self) -> None:
        plan = {"server": {"address": "127.0.0.1", "port": 8443}, "sites": list(self.names)}
        path = self.folder / "federation.yaml"
        path.write_text(yaml.safe_dump(plan))
        provision.write_kits(provision.read_federation(path), self.folder / "kits")
        write_data(self.folder / "data", self.folder / "kits", self.names, rows=self.rows)
        for name in self.names:
            self.change(name, "site.yaml", views=VIEWS)
            self.change(name, "policy.yaml", **OPEN, bundles=[BUNDLE], strategies=["fedfrozen", "local"])

    def kit(self, name: str) -> Kit:
        return Kit.read(self.folder / "kits" / name)

    def change(self, name: str, file: str, **values: object) -> None:
        path = self.folder / "kits" / name / file
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))

    def restart(self) -> None:
        """New processes: only the disks remember."""
        self.executors = {name: RequestHandler(self.kit(name)) for name in self.names}

    def words(self, *overrides: str) -> list[str]:
        data = [f"dataset.path={self.folder}/data/server", "++run_id=test"]
        wait = [f"runtime={self.runtime}", "runtime.node_timeout=0.3", "++runtime.min_nodes=3"]
        return [*self.settings, "dataset=images", *data, *wait, *overrides]

    def train(
        self,
        *overrides: str,
        folder: str = "run",
        resume: bool = False,
        make_grid: Callable[..., Grid] | None = None,
        bundle: str = BUNDLE,
    ) -> Run:
        """One run over the sites, each time as if Flower had started it anew."""
        words = self.words(*overrides)
        composed = compose_run(words)
        config = composed.config
        self.restart()
        grid = (make_grid or SiteGrid)(self.executors, bundle)
        corpus = load_corpus(config)
        worker = Worker(config, corpus, shares=server_only(corpus, config))
        target = self.folder / folder
        start = checkpoint.newest(target) if resume else None
        if config.start_from is not None:
            start = checkpoint.read(Path(config.start_from))
        job = Job(composed, target, start)
        self.flower_run += 1
        connection = open_connection(grid, job, worker, self.flower_run)
        gather(connection.membership, config)
        federate(job, connection, worker)
        return Run(target)


def copy_of(prepared: Path, folder: Path) -> Path:
    """Kits and data of its own for one test; the hundreds of pictures, which nobody writes, are linked."""

    def copy(source: str, target: str) -> None:
        (os.link if source.endswith(".png") else shutil.copy2)(source, target)

    shutil.copytree(prepared, folder, copy_function=copy)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    Sites(folder).prepare()
    return folder


@pytest.fixture
def sites(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    copy_of(prepared, tmp_path / "sites")
    return Sites(tmp_path / "sites")


def with_prompts(folder: Path, strategy: str, words: Sequence[str]) -> Sites:
    """Three sites that let the prompts of this strategy leave, and nothing else."""
    own = [word for word in words if not word.startswith(("num_clients", "dataset", "partition"))]
    found = Sites(folder, settings=own)
    folder.mkdir()
    found.prepare()
    for name in found.names:
        found.change(name, "policy.yaml", strategies=[strategy], upload_roles=["prompt"])
    return found


class SiteGrid(InProcessGrid):
    """Messages go to the sites' executors, as bytes."""

    def __init__(self, executors: dict[str, RequestHandler], bundle: str = BUNDLE) -> None:
        super().__init__(client_app.app, len(executors), {})  # no override reaches a site
        self.executors = list(executors.values())
        self.bundle = bundle
        self._loaded: dict[int, tuple] = {}
        for context in self.contexts.values():
            context.node_config.clear()

    def run_client(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        # Each site is a process with a model of its own.
        workers.install(*self._loaded.get(node, (None, None)))
        reply = self.executors[node - 1].handle(message, self.contexts[node], self.bundle)
        self._loaded[node] = workers.installed()
        return reply
