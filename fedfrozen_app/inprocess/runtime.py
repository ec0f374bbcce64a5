"""The default runtime: server and clients in one process, on one resident model."""

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedfrozen_app import client_app
from fedfrozen_app.config import devices_of
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.digests import digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.files import lease
from fedfrozen_app.files.checkpoint import Checkpoint, partition_differences
from fedfrozen_app.inprocess.grid import CohortGrid, InProcessGrid, PrivateGrid
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.resident import Resident, install, run_key
from fedfrozen_app.local.spread import SpreadRunner
from fedfrozen_app.models.roles import KERNEL
from fedfrozen_app.run.federate import explain_disk_errors, federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.server.adapter_rule import make_rule
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server.sampling import draw_cohort

log = logging.getLogger(__name__)
Stacked = Callable[[Resident, Sequence[str]], CohortRunner]  # the runner of one run beside others
SMALL_MODEL = 100_000  # parameters; measured on two cores, where stacking wins below and loses above
PRIVATE_BLOCK = 50  # clients whose private replies may be in memory at once


def run_in_process(
    job: Job, corpus: Corpus | None = None, resident: Resident | None = None
) -> dict[str, Any]:
    """Train to the end and return the summary.

    `corpus` spares reading the data again, `resident`, of an earlier run, also compiling a step again.
    """
    config = job.config
    corpus = resident.corpus if resident is not None else corpus or load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    if resident is None:
        resident = Resident(config, corpus, shares=shares)
    else:
        resident.switch_to(config, shares)
    return run_with(resident, job)


def run_with(resident: Resident, job: Job, stacked: Stacked | None = None) -> dict[str, Any]:
    """The same with a resident that is ready for this job; `stacked`: beside other runs (stacked.py)."""
    assert resident.shares.partition is not None
    count = len(resident.shares.partition.indices)
    job = job.with_clients(count)
    # The key only has to differ between runs of one process.
    settings = {"overrides": f"in process: {job.folder}", "output-dir": str(job.folder)}
    grid = make_grid(resident, count, settings, stacked)
    key = run_key(next(iter(grid.contexts.values())))
    install(key, resident)
    if job.start is not None:
        restore(grid, resident, job.start, job.resolved_config)
    conversation = Conversation(grid, resident.roles, card=resident.card, local=True)

    def client_state() -> dict[str, dict[str, Tensor]]:
        return {
            str(context.node_config["partition-id"]): to_tensors(cast(ArrayRecord, context.state["private"]))
            for context in grid.contexts.values()
            if "private" in context.state
        }

    # Threads and kernels are the process's: of several runs at once nobody may set them alone.
    kernels = for_its_size(resident) if stacked is None else nullcontext()
    with explain_disk_errors(job.folder), lease.held(job.folder), kernels, _ended(grid, resident):
        return federate(job, conversation, resident, client_state)


@contextmanager
def _ended(grid: InProcessGrid, resident: Resident) -> Iterator[None]:
    """Afterwards clients have written what they keep, and noise for a round that never came is let go."""
    try:
        yield
    finally:
        grid.close()
        if resident.private_noise is not None:
            resident.private_noise.drop()


@contextmanager
def same_kernels() -> Iterator[None]:
    """Afterwards, those of before. On a CPU without bf16, torch turns oneDNN off at the first bf16 product,
    for the rest of the process. The next run would then round its float32 products differently."""
    before = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def for_its_size(resident: Resident) -> Iterator[None]:
    """A very small Transformer on a CPU, where nobody has chosen runner or threads: a second thread waits
    more than it works, and on ARM oneDNN takes longer to begin a product than to compute it."""
    runtime, threads = resident.config.runtime, torch.get_num_threads()
    attends = any(role.kind in KERNEL for role in resident.roles.values())
    with same_kernels():
        if runtime.runner == "auto" and runtime.threads is None and attends and is_small(resident):
            torch.set_num_threads(1)
            if platform.machine() == "aarch64":
                torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def is_small(resident: Resident) -> bool:
    """On a CPU: so small that a step is mostly overhead."""
    size = sum(value.numel() for value in resident.parameters.values())
    return resident.device.type == "cpu" and size < SMALL_MODEL


def wants_cohort(resident: Resident) -> bool:
    """Whether the cohort runner was asked for; `auto` stacks the cohort where a client's step is mostly
    overhead: on a GPU, and on a CPU with a very small model. It cannot compute activations again."""
    if resident.config.model.gradient_checkpointing:
        return False
    runner, on_gpu = resident.config.runtime.runner, resident.device.type == "cuda"
    return runner == "cohort" or (runner == "auto" and (on_gpu or is_small(resident)))


def make_grid(
    resident: Resident, num_clients: int, settings: dict[str, str], stacked: Stacked | None = None
) -> InProcessGrid:
    """With the runner that was asked for."""
    config, together = resident.config, wants_cohort(resident)
    if together and config.privacy.name == "none" and not config.adapter.ranks:
        log.info("Clients train together on %s (the cohort runner).", resident.device)
        clients = [str(number) for number in range(num_clients)]
        expected = partial(draw_cohort, clients, config.participation, config.seed)
        if stacked is not None:
            runner = stacked(resident, expected(1))
        else:
            runner = resident.cohort = resident.cohort or make_runner(resident, expected(1))
        return CohortGrid(client_app.app, num_clients, settings, runner, expected)
    reason = "their adapters differ in rank" if config.adapter.ranks else None
    if together and config.privacy.name != "none":
        from fedfrozen_app.local import private_stack  # Opacus takes long to load

        reason = private_stack.cannot_stack(resident)
        if reason is None:
            log.info("Clients take their private steps together on %s.", resident.device)
            resident.own_weights.begin()  # before the first step asks for them
            most = config.runtime.max_block or PRIVATE_BLOCK
            given = (client_app.answer, private_stack.take_steps, most, client_app.app)
            return PrivateGrid(*given, num_clients, settings)
    because = f", because {reason}" if together and reason else ""
    log.info("Clients train one after another on %s (the sequential runner)%s.", resident.device, because)
    return InProcessGrid(client_app.app, num_clients, settings)


def make_runner(resident: Resident, typical: Sequence[str]) -> CohortRunner:
    """On as many GPUs as were asked for."""
    _, *more = devices_of(resident.config)
    if not more:
        return CohortRunner(resident, typical)
    log.info("The clients of a round are spread over %d GPUs.", 1 + len(more))
    config, corpus, shares = resident.config, resident.corpus, resident.shares
    others = [Resident(config, corpus, shares=shares, device=device) for device in more]
    return SpreadRunner(resident, others, typical)


def restore(
    grid: InProcessGrid, resident: Resident, start: Checkpoint, resolved_config: dict[str, Any]
) -> None:
    """Give the clients back what they had: private arrays, and the base that the ledger says they hold."""
    if start.clients and (other := partition_differences(resolved_config, start.config)):
        raise UserError(
            f"This run has another {other[0]} than the checkpoint, whose clients keep private arrays for "
            "rows of their own: give the same seed, num_clients, partition and dataset."
        )
    resident.compiling.load_state_dict(start.hooks.get("compiling", {}))
    for context in grid.contexts.values():
        arrays = start.clients.get(str(context.node_config["partition-id"]))
        if arrays is not None:
            context.state["private"] = to_record(arrays, local=True)
    rule = make_rule(resident.config)
    for client in [None, *rule.ranks]:
        own = {} if client is None else rule.narrowed(client, start.model)
        cache = resident.cache if client is None else resident.cache_of(client)
        for tensor in {**start.model, **own}.values():
            cache.put(digest(tensor), tensor)
