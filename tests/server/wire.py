"""In-process runs whose messages travel as bytes, as between machines."""

import shlex
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fedfrozen_app import client_app
from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.connection import connect
from tests.conftest import SMALL, Run

ROUNDS = ["num_rounds=4", "strategy.warmup_rounds=2"]


def wired(words, nodes, before_round=None, num_clients=3):
    """A grid that sends bytes, and the grid under it."""

    class WireGrid(InProcessGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if before_round and messages and messages[0].metadata.group_id:
                before_round(int(messages[0].metadata.group_id))
            return super().push_messages(messages)

    grid = WireGrid(client_app.app, num_clients, {"overrides": shlex.join(words)})
    for context, node in zip(grid.contexts.values(), nodes, strict=True):
        context.node_config.clear()
        context.node_config.update(node)
    return grid


def run_wired(tmp_path, before_round=None, extra=ROUNDS, small=True):
    words = [*(SMALL if small else ()), *extra, f"++runtime.cache_dir={tmp_path}/cache"]
    nodes = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
    grid = wired(words, nodes, before_round)
    composed = compose_run(words)
    config = composed.config
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, 3))
    connection = connect(grid, worker.roles, data_spec=worker.data_spec)
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    federate(Job(composed, tmp_path / "wired", start), connection, worker)
    return Run(tmp_path / "wired")


def forget_process():
    """A new process: nothing is loaded, only the disk remembers."""
    workers.install(None, None)


def write_sites(folder):
    """Digits as pictures: the north has few of the large digits, the south few of the small ones."""
    pixels, labels = load_digits(return_X_y=True)
    for number in range(240):
        site = "north" if (labels[number] < 5) == (number % 5 > 0) else "south"
        target = folder / site / str(labels[number])
        target.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels[number].reshape(8, 8) * 15).astype(np.uint8))
        image.save(target / f"{number}.png")
