"""The default runtime: server and clients in one process, on one worker model."""

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app import client_app
from fedfrozen_app.adapters.rule import make_rule
from fedfrozen_app.config import Config, excluded_clients
from fedfrozen_app.config.differences import partition_differences
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.logs import about
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.files import lease
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.files.client_segments import ClientSegments
from fedfrozen_app.handlers.train_handler import handle_train
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.private_noise import drop_noise
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import install, run_key
from fedfrozen_app.run.federate import explain_disk_errors, federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.cohort_grid import CohortGrid
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.runtimes.inprocess.private_grid import PrivateGrid
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.pacer import replies_of_a_step
from fedfrozen_app.server.sampling import cohort_size, draw_cohort

log = logging.getLogger(__name__)
MakeRunner = Callable[[Worker, Sequence[str]], CohortRunner]  # from a worker and a typical cohort
MakeGrid = Callable[[Worker, int, dict[str, str]], InProcessGrid]  # from a worker, clients and settings
STATES_IN_MEMORY = 1 << 30  # bytes of clients' kept state in memory; the rest is on disk
SMALL_MODEL = 100_000  # parameters; measured on two cores, where stacking wins below and loses above
PRIVATE_BLOCK = 50  # clients whose private replies may be in memory at once


def run_in_process(job: Job, corpus: Corpus | None = None, worker: Worker | None = None) -> dict[str, Any]:
    """Train to the end and return the summary.

    `corpus` saves reading the data again; `worker`, of an earlier run, also compiling a step again.
    """
    config = job.config
    corpus = worker.corpus if worker is not None else corpus or load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    if worker is None:
        worker = Worker(config, corpus, shares=shares)
    else:
        worker.switch_to(config, shares)
    return run_with(worker, job)


def run_with(
    worker: Worker,
    job: Job,
    make_cohort_runner: MakeRunner | None = None,
    make_grid: MakeGrid | None = None,
) -> dict[str, Any]:
    """Run the job with a worker that is ready for it.

    `make_cohort_runner` makes it one of several concurrent runs (concurrent_runs.py). `make_grid` replaces
    the grid whose clients live in this process.
    """
    assert worker.shares.partition is not None
    count = len(worker.shares.partition.indices)
    job = job.with_clients(count)
    # The key only has to differ between runs of one process.
    settings = {"overrides": f"in process: {job.folder}", "output-dir": str(job.folder)}
    if make_grid is None:
        make_grid = partial(grid_here, make_cohort_runner=make_cohort_runner)
    grid = make_grid(worker, count, settings)
    key = run_key(next(iter(grid.contexts.values())))
    install(key, worker)
    segments = ClientSegments(job.folder)
    grid.contexts.spill_to(segments, STATES_IN_MEMORY)
    excluded = excluded_clients(job.config)
    connection = connect(grid, worker.roles, data_spec=worker.data_spec, local=True, excluded=excluded)

    def client_state() -> dict[str, dict[str, Tensor]]:
        if grid.contexts.spilled:
            grid.contexts.write_changed()
            return {}
        return {str(partition): arrays for partition, arrays in grid.contexts.states().items()}

    # Threads and oneDNN are settings of the process: concurrent runs set them once, for all of them.
    tuned = tuned_for_size(worker) if make_cohort_runner is None else nullcontext()
    logged = about(run=job.config.run_id or job.folder.name)
    with explain_disk_errors(job.folder), lease.held(job.folder), tuned, logged, _ended(grid, worker):
        if job.start is None:
            segments.clear()
        else:
            restore(grid, worker, job.start, job.resolved_config)
            segments.restore(job.start.segments, job.source)
        return federate(job, connection, worker, client_state, segments)


@contextmanager
def _ended(grid: InProcessGrid, worker: Worker) -> Iterator[None]:
    """On exit, wait for clients' writes, and drop noise drawn for a round that did not take place."""
    try:
        yield
    finally:
        grid.close()
        drop_noise(worker)


@contextmanager
def restored_onednn() -> Iterator[None]:
    """On exit, switch oneDNN on or off as it was. On a CPU without bf16, torch turns it off at the first bf16
    product, for the rest of the process. The next run would then round its float32 products differently."""
    before = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def tuned_for_size(worker: Worker) -> Iterator[None]:
    """One thread, and on ARM no oneDNN, for a very small Transformer on a CPU.

    A second thread mostly waits there, and oneDNN takes longer to set up a product than to compute it. Only
    if the configuration sets neither the runner nor the threads.
    """
    runtime, threads = worker.config.runtime, torch.get_num_threads()
    attends = any(role.kind in KERNEL for role in worker.roles.values())
    with restored_onednn():
        if runtime.runner == "auto" and runtime.threads is None and attends and is_small(worker):
            torch.set_num_threads(1)
            if platform.machine() == "aarch64":
                torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def is_small(worker: Worker) -> bool:
    """On a CPU: so small that a step is mostly overhead."""
    size = sum(value.numel() for value in worker.parameters.values())
    return worker.device.type == "cpu" and size < SMALL_MODEL


def wants_cohort(worker: Worker) -> bool:
    """Whether to use the cohort runner, which does not support gradient checkpointing.

    With `auto` it is used if a client's step is mostly overhead: on a GPU, and on a CPU with a very
    small model.
    """
    if worker.config.model.gradient_checkpointing:
        return False
    runner, on_gpu = worker.config.runtime.runner, worker.device.type == "cuda"
    return runner == "cohort" or (runner == "auto" and (on_gpu or is_small(worker)))


def grid_here(
    worker: Worker, num_clients: int, settings: dict[str, str], make_cohort_runner: MakeRunner | None = None
) -> InProcessGrid:
    """The grid with the runner that the configuration asks for."""
    config, together = worker.config, wants_cohort(worker)
    masked = config.secure_aggregation.name == "on"  # then the cohort runner could serve no request
    if together and config.privacy.name == "none" and not config.adapter.ranks and not masked:
        log.info("Clients train together on %s (the cohort runner).", worker.device)
        clients = Numbered(num_clients, frozenset(excluded_clients(config)))
        typical = draw_cohort(clients, typical_share(config, len(clients)), config.seed, 1)
        # Pacing's event queue decides cohorts during the run, and a Ray worker trains parts of cohorts.
        known = config.pacing.name == "synchronous" and config.runtime.name == "inprocess"
        expected = nobody if not known else partial(draw_cohort, clients, config.participation, config.seed)
        if make_cohort_runner is not None:
            runner = make_cohort_runner(worker, typical)
        else:
            runner = worker.kept.for_worker(CohortRunner, lambda: CohortRunner(worker, typical))
        return CohortGrid(client_app.app, num_clients, settings, runner, expected)
    reason = "their adapters differ in rank" if config.adapter.ranks else None
    if masked and config.privacy.name == "none":
        reason = "each of them masks what it sends"
    if together and config.privacy.name != "none":
        from fedfrozen_app.local import private_stack  # Opacus takes long to load

        reason = private_stack.cannot_stack(worker)
        if reason is None:
            log.info("Clients take their private steps together on %s.", worker.device)
            worker.per_client_kernels.begin()  # before the first step needs them
            most = config.runtime.max_block or PRIVATE_BLOCK
            steps = private_stack.take_steps
            return PrivateGrid(handle_train, steps, most, client_app.app, num_clients, settings)
    because = f", because {reason}" if together and reason else ""
    log.info("Clients train one after another on %s (the sequential runner)%s.", worker.device, because)
    return InProcessGrid(client_app.app, num_clients, settings)


def nobody(server_round: int) -> list[str]:
    return []


def typical_share(config: Config, clients: int) -> float:
    """The usual share of clients that start from the same version of the model."""
    share, pacing = config.participation, config.pacing
    if pacing.name != "buffered":
        return share
    at_work = pacing.concurrency or cohort_size(share, clients)
    return min(1.0, replies_of_a_step(pacing, at_work) / clients)


def restore(grid: InProcessGrid, worker: Worker, start: Checkpoint, resolved_config: dict[str, Any]) -> None:
    """Restore the clients from a checkpoint: private arrays, and the base that the ledger lists for them."""
    if (start.clients or start.segments) and (other := partition_differences(resolved_config, start.config)):
        raise UserError(
            f"This run has another {other[0]} than the checkpoint, whose clients keep private arrays for "
            "rows of their own: give the same seed, num_clients, partition and dataset."
        )
    worker.kept.for_run(Compiling).load_state_dict(start.hooks.get("compiling", {}))
    grid.contexts.restore({int(client): arrays for client, arrays in start.clients.items()})
    rule = make_rule(worker.config)
    for client in [None, *rule.ranks]:
        own = {} if client is None else rule.narrowed(client, start.model)
        cache = worker.cache if client is None else worker.cache_of(client)
        for tensor in {**start.model, **own}.values():
            cache.put(digest(tensor), tensor)
