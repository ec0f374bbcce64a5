"""A Ray actor that holds data and model for a whole run."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.own_objects import take_over
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.runtimes.ray.packing import Packed
from fedfrozen_app.runtimes.ray.part import PartOrder, PartReply
from fedfrozen_app.runtimes.ray.part_trainer import NO_ARRAYS, PartTrainer

log = logging.getLogger(__name__)
SAMPLED = 3  # clients whose rows are compared between a worker and the server


@dataclass(frozen=True)
class RunSetup:
    """What a worker needs to take part in a run."""

    config: Config
    clients: int
    settings: dict[str, str]  # of the clients' Flower contexts
    parts: int  # into how many a round is divided
    gpus: float  # of the worker: below 1, it shares the GPU with others
    environment: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """What a worker says of itself once it has loaded model and data; or why it cannot take part."""

    process: int = 0
    host: str = ""
    device: str = ""
    data: str = ""  # digest of what the clients' data are
    torch: str = torch.__version__
    user_error: str = ""


class TrainingActor:
    """The process of one worker. Its methods return errors that people can mend as sentences: Ray would
    wrap them into a traceback."""

    def __init__(self, setup: RunSetup) -> None:
        self._error = ""
        self._trainer: PartTrainer | None = None
        prepare_logging()
        os.environ.update(setup.environment)
        try:
            self._trainer = _trainer(setup)
        except (UserError, RunFailed) as error:
            self._error = str(error)

    def ready(self) -> Ready:
        if self._trainer is None:
            return Ready(user_error=self._error)
        worker = self._trainer.worker
        return Ready(os.getpid(), os.uname().nodename, str(worker.device), data_digest(worker))

    def train(self, order: PartOrder, common: Packed = NO_ARRAYS) -> PartReply:
        assert self._trainer is not None
        return self._trainer.train(order, common)


def _trainer(setup: RunSetup) -> PartTrainer:
    take_over()
    config = setup.config
    threads = config.runtime.threads or int(config.runtime.cpus_per_worker)
    torch.set_num_threads(threads)
    if setup.gpus and not torch.cuda.is_available():
        raise UserError(
            f"The worker on {os.uname().nodename} was given a GPU by Ray, and torch sees none there: install "
            "a build of torch for its driver, or set runtime.gpus_per_worker=0."
        )
    if 0 < setup.gpus < 1:  # what a worker takes must not depend on how quick the others are
        torch.cuda.set_per_process_memory_fraction(setup.gpus)
    corpus = load_corpus(config)
    shares = share_out(corpus, config, setup.clients)
    return PartTrainer(Worker(config, corpus, shares=shares), setup.clients, setup.settings, setup.parts)


def data_digest(worker: Worker) -> str:
    """Of how the data are read, how many rows there are, and which of them the first clients have."""
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
