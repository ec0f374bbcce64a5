"""Several runs of one shape in one process: each has its own server, folder and clients, and their local work
is one stacked step. What a run leaves is what it leaves on its own."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from fedfrozen_app.config import stack_runs
from fedfrozen_app.data.federated import share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.inprocess.runtime import for_its_size, run_with, wants_cohort
from fedfrozen_app.inprocess.strand import Strand
from fedfrozen_app.local.cohort import Trained, Work
from fedfrozen_app.local.resident import Resident, install, installed
from fedfrozen_app.local.stack import Stack, StackedRunner, draws_at_random
from fedfrozen_app.run.job import Job

log = logging.getLogger(__name__)
Summary = dict[str, Any]
Within = Callable[[Job], AbstractContextManager[Any]]
LARGE_MODEL = 1_000_000  # parameters: from here on one run fills a GPU
CLIENTS = 100  # of all runs, at once


class Bench:
    """What runs of one shape share in a process, and what the next ones find ready: the data on the device,
    a model for each run beside the others, and the recorded steps."""

    def __init__(self, corpus: Corpus, runs: int) -> None:
        self.corpus = corpus
        self.stack = Stack(runs)
        self.residents: list[Resident] = []

    def resident(self, place: int, job: Job) -> Resident:
        """The one in this place, for this job."""
        shares = share_out(self.corpus, job.config, job.config.num_clients)
        if place < len(self.residents):
            self.residents[place].switch_to(job.config, shares)
        else:
            first = self.residents[0] if self.residents else None
            self.residents.append(Resident(job.config, self.corpus, shares=shares, beside=first))
        return self.residents[place]


def runs_at_once(resident: Resident, cohort: int) -> int:
    """How many runs of this shape train side by side: `runtime.stack_runs`."""
    asked = stack_runs(resident.config)
    if asked is not None:
        return asked
    size = sum(value.numel() for value in resident.parameters.values())
    if resident.device.type != "cuda" or size >= LARGE_MODEL or resident.config.runtime.gpus > 1:
        return 1
    return max(1, CLIENTS // cohort)


def why_apart(jobs: Sequence[Job], resident: Resident) -> str | None:
    """Why these cannot train side by side with the run of this resident; None where they can."""
    if not all(resident.can_switch_to(job.config) for job in jobs):
        return "they differ in model, dataset or local training"
    if not wants_cohort(resident) or resident.config.privacy.name != "none":
        return "their clients do not train together (runtime.runner=cohort)"
    if draws_at_random(resident):
        return "their model draws random numbers while it trains, such as for dropout"
    return None


def run_stacked(
    jobs: Sequence[Job], bench: Bench, within: Within = nullcontext
) -> list[Summary | BaseException]:
    """Train all to the end: the summary of each, or why it has none. One that fails leaves the others.

    `within` surrounds each run, and sees how it ends.
    """
    found: list[Summary | BaseException] = []
    size = bench.stack.runs
    if size > 1 and (reason := why_apart(jobs[1:], bench.resident(0, jobs[0]))):
        log.info("Runs train one after another, because %s.", reason)
        size = 1
    for first in range(0, len(jobs), size):
        found += _together(jobs[first : first + size], bench, within)
    return found


def _together(jobs: Sequence[Job], bench: Bench, within: Within) -> list[Summary | BaseException]:
    if len(jobs) == 1:  # nobody to wait for
        try:
            with within(jobs[0]):
                return [run_with(bench.resident(0, jobs[0]), jobs[0])]
        except Exception as error:  # noqa: BLE001  (the caller's to judge, as below)
            return [error]
    strands = [Strand(partial(_run, job, bench, place, within)) for place, job in enumerate(jobs)]
    try:
        with for_its_size(bench.residents[0]):
            for strand in strands:
                strand.start()
            while waiting := [strand for strand in strands if strand.asks is not None]:
                for strand, answer in _answers(waiting, bench.stack):
                    strand.answer(answer)
    except BaseException:  # such as Ctrl-C: every run ends as one on its own would
        for strand in strands:
            while strand.asks is not None:
                strand.answer(KeyboardInterrupt())
        raise
    return [strand.error if strand.error is not None else strand.result or {} for strand in strands]


def _run(job: Job, bench: Bench, place: int, within: Within, strand: Strand[Summary]) -> Summary:
    """One of several."""

    def ask(work: Work) -> list[Trained]:
        """Meanwhile others are the process's run."""
        mine = installed()
        trained = strand.ask(work)
        install(*mine)
        return trained

    def runner(resident: Resident, typical: Sequence[str]) -> StackedRunner:
        return StackedRunner(resident, typical, bench.stack, ask)

    with within(job):
        return run_with(bench.resident(place, job), job, runner)


def _answers(waiting: Sequence[Strand[Summary]], stack: Stack) -> list[tuple[Strand[Summary], Any]]:
    """What each asked for. Works of one kind are trained together, whichever their rounds."""
    kinds: dict[Any, list[Strand[Summary]]] = {}
    for strand in waiting:
        kinds.setdefault(strand.asks.order.kind, []).append(strand)
    found: list[tuple[Strand[Summary], Any]] = []
    for group in kinds.values():
        try:
            answers: Sequence[Any] = stack.train([strand.asks for strand in group])
        except Exception as error:  # noqa: BLE001  (it is theirs: each run fails with it as one alone would)
            answers = [error] * len(group)
        found += zip(group, answers, strict=True)
    return found
