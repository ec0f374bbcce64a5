"""Train several runs of the same shape concurrently in one process.

Each has its own server, folder and clients, but their clients train in one stacked step. A run
writes the same results as it does alone.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from fedfrozen_app.config import stack_runs
from fedfrozen_app.data.federated import share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.local.round_work import RoundWork, Trained
from fedfrozen_app.local.stack import Stack, StackedRunner, draws_at_random
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import install, installed
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.coroutine import ThreadCoroutine
from fedfrozen_app.runtimes.inprocess.runtime import run_with, tuned_for_size, wants_cohort

log = logging.getLogger(__name__)
Summary = dict[str, Any]
Within = Callable[[Job], AbstractContextManager[Any]]
LARGE_MODEL = 1_000_000  # parameters: from here on one run fills a GPU
CLIENTS = 100  # of all runs together


class WorkerPool:
    """Objects that runs of one shape share in a process: the data on the device, a worker for each concurrent
    run, and the captured steps."""

    def __init__(self, corpus: Corpus, runs: int) -> None:
        self.corpus = corpus
        self.stack = Stack(runs)
        self.workers: list[Worker] = []

    def worker(self, place: int, job: Job) -> Worker:
        """The worker in this place, switched to this job."""
        shares = share_out(self.corpus, job.config, job.config.num_clients)
        if place < len(self.workers):
            self.workers[place].switch_to(job.config, shares)
        else:
            first = self.workers[0] if self.workers else None
            self.workers.append(Worker(job.config, self.corpus, shares=shares, tables_of=first))
        return self.workers[place]


def runs_at_once(worker: Worker, cohort: int) -> int:
    """How many runs of this shape train concurrently: `runtime.stack_runs`."""
    asked = stack_runs(worker.config)
    if asked is not None:
        return asked
    size = sum(value.numel() for value in worker.parameters.values())
    if worker.device.type != "cuda" or size >= LARGE_MODEL:
        return 1
    return max(1, CLIENTS // cohort)


def why_not_concurrent(jobs: Sequence[Job], worker: Worker) -> str | None:
    """Why these jobs cannot train concurrently with the run of this worker; None where they can."""
    if not all(worker.can_switch_to(job.config) for job in jobs):
        return "they differ in model, dataset or local training"
    if not wants_cohort(worker) or worker.config.privacy.name != "none":
        return "their clients do not train together (runtime.runner=cohort)"
    if draws_at_random(worker):
        return "their model draws random numbers while it trains, such as for dropout"
    return None


def run_concurrently(
    jobs: Sequence[Job], pool: WorkerPool, within: Within = nullcontext
) -> list[Summary | BaseException]:
    """Train all to the end: the summary of each, or its error. If one fails, the others continue.

    `within`: a context manager around each run, which gets its outcome.
    """
    found: list[Summary | BaseException] = []
    size = pool.stack.runs
    if size > 1 and (reason := why_not_concurrent(jobs[1:], pool.worker(0, jobs[0]))):
        log.info("Runs train one after another, because %s.", reason)
        size = 1
    for first in range(0, len(jobs), size):
        found += _run_group(jobs[first : first + size], pool, within)
    return found


def _run_group(jobs: Sequence[Job], pool: WorkerPool, within: Within) -> list[Summary | BaseException]:
    """Train as many jobs as fit at once."""
    if len(jobs) == 1:  # no need to wait for others
        try:
            with within(jobs[0]):
                return [run_with(pool.worker(0, jobs[0]), jobs[0])]
        except Exception as error:  # noqa: BLE001  (the caller decides about it, as below)
            return [error]
    runs = [ThreadCoroutine(partial(_run, job, pool, place, within)) for place, job in enumerate(jobs)]
    try:
        with tuned_for_size(pool.workers[0]):
            for run in runs:
                run.start()
            while waiting := [run for run in runs if run.requested is not None]:
                for run, trained in _train(waiting, pool.stack):
                    run.resume(trained)
    except BaseException:  # such as Ctrl-C: each run ends as it would alone
        for run in runs:
            while run.requested is not None:
                run.resume(KeyboardInterrupt())
        raise
    return [run.error if run.error is not None else run.result or {} for run in runs]


def _run(
    job: Job, pool: WorkerPool, place: int, within: Within, coroutine: ThreadCoroutine[Summary]
) -> Summary:
    """One of several runs: suspends whenever its clients are to train."""

    def request(work: RoundWork) -> list[Trained]:
        """While it is suspended, other runs install their workers."""
        mine = installed()
        trained = coroutine.request(work)
        install(*mine)
        return trained

    def runner(worker: Worker, typical: Sequence[str]) -> StackedRunner:
        return StackedRunner(worker, typical, pool.stack, request)

    with within(job):
        return run_with(pool.worker(place, job), job, runner)


def _train(
    waiting: Sequence[ThreadCoroutine[Summary]], stack: Stack
) -> list[tuple[ThreadCoroutine[Summary], Any]]:
    """Do the work that each run requested. Work of one kind is trained together, even from different
    rounds."""
    kinds: dict[Any, list[ThreadCoroutine[Summary]]] = {}
    for run in waiting:
        kinds.setdefault(run.requested.request.kind, []).append(run)
    found: list[tuple[ThreadCoroutine[Summary], Any]] = []
    for group in kinds.values():
        try:
            trained: Sequence[Any] = stack.train([run.requested for run in group])
        except Exception as error:  # noqa: BLE001  (each run fails with it, as it would alone)
            trained = [error] * len(group)
        found += zip(group, trained, strict=True)
    return found
