"""Load the data and the model of a Ray worker, and compare the data with the server's."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.own_objects import take_over
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.runtimes.ray.part_trainer import PartTrainer
from fedfrozen_app.runtimes.ray.worker_setup import RunSetup

SAMPLED = 3  # clients whose rows are compared between a worker and the server


def load_trainer(setup: RunSetup) -> PartTrainer:
    prepare_logging()
    take_over()
    config = setup.config
    torch.set_num_threads(config.runtime.threads or int(config.runtime.cpus_per_worker))
    if setup.gpus and not torch.cuda.is_available():
        raise UserError(
            f"The worker on {os.uname().nodename} was given a GPU by Ray, and torch sees none there: install "
            "a build of torch for its driver, or set runtime.gpus_per_worker=0."
        )
    if 0 < setup.gpus < 1:  # a worker's memory must not depend on how fast the others are
        torch.cuda.set_per_process_memory_fraction(setup.gpus)
    corpus = load_corpus(config)
    shares = share_out(corpus, config, setup.clients)
    return PartTrainer(Worker(config, corpus, shares=shares), setup.clients, setup.settings, setup.parts)


def data_digest(worker: Worker) -> str:
    """Digest of the data format, the number of rows, and the first clients' rows."""
    found = hashlib.sha256(json.dumps(_plain(worker.data_spec), sort_keys=True).encode())
    found.update(str(len(worker.train_table.labels)).encode())
    partition = worker.shares.partition
    assert partition is not None
    for client in range(min(SAMPLED, len(partition.indices))):
        found.update(worker.rows(str(client)).train.cpu().numpy().tobytes())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else str(value)
