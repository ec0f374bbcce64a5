"""Execute a job in its runtime, and load the results of a finished one."""

import importlib
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfrozen_app.config import ComposedConfig, Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import resume_command
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.kinds import check_is_run
from fedfrozen_app.files.readers import Damaged, read_arrays, read_object
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report.console import show_end
from fedfrozen_app.report.track import check_installed
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import shares_model
from fedfrozen_app.run.outside import remember
from fedfrozen_app.run.own_record import check_local
from fedfrozen_app.run.prepare import check_fits
from fedfrozen_app.run.stored_config import stored_config
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently, runs_at_once
from fedfrozen_app.server.sampling import cohort_size

log = logging.getLogger(__name__)
# Imported when one is chosen: Flower's own command line takes about a second to import.
RUNTIMES = {
    "inprocess": "fedfrozen_app.runtimes.inprocess.runtime:run_in_process",
    "ray": "fedfrozen_app.runtimes.ray.ray_runtime:run_on_ray",
    "flower": "fedfrozen_app.runtimes.flower.simulated:run_with_flower",
    "deployed": "fedfrozen_app.runtimes.flower.deployed:run_deployed",
}


def execute(job: Job) -> dict[str, Any]:
    """Run in the configured runtime, and show the result."""
    check_place(job)
    check_local(job.resolved_config, job.config.runtime.name)
    remember(job.resolved_config)
    try:
        module, _, function = RUNTIMES[job.config.runtime.name].partition(":")
        summary = getattr(importlib.import_module(module), function)(job)
    except KeyboardInterrupt:
        state = checkpoint.newest_state(job.folder)
        lost = job.config.runtime.name == "flower" and state is not None and state["hooks"].get("private")
        again = f" Go on with: {resume_command(job.folder)}" if state and not lost else ""
        print(f"Interrupted. What was done is in {job.folder}.{again}", file=sys.stderr)
        raise
    show_end(summary, job.folder)
    return summary


def execute_side_by_side(
    jobs: Sequence[Job], within: Callable[[Job], AbstractContextManager[Any]]
) -> list[BaseException | None]:
    """The same for jobs of one shape, as many at a time as `runtime.stack_runs` allows; returns the reason
    why each failed, or None. `within`: a context manager around each run."""
    for job in jobs:
        remember(job.resolved_config)
    pool = WorkerPool(load_corpus(jobs[0].config), 1)
    worker = pool.worker(0, jobs[0])
    parts = worker.shares.partition
    assert parts is not None
    cohort = cohort_size(jobs[0].config.participation, len(parts.indices))
    size = min(runs_at_once(worker, cohort), len(jobs))
    pool.stack.runs = size
    log.info("%d runs of one shape, up to %d side by side: the bar is the first one's.", len(jobs), size)
    # They advance together: one bar shows them all.
    jobs = [replace(job, shown=number % size == 0) for number, job in enumerate(jobs)]
    found = run_concurrently(jobs, pool, within)
    for job, outcome in zip(jobs, found, strict=True):
        if isinstance(outcome, dict):
            show_end(outcome, job.folder)
    return [None if isinstance(outcome, dict) else outcome for outcome in found]


def run_folder(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or ("=" in arguments[0] and not Path(arguments[0]).exists()):
        raise UserError(f"Say which run: fedfrozen {verb} RUN, where RUN is the folder of its results.")
    run = Path(arguments[0]).expanduser().resolve()
    if not run.is_dir():
        raise UserError(f"There is no run folder {arguments[0]}: give the folder that holds summary.json.")
    check_is_run(run)
    return run, arguments[1:]


def finished(run: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    summary = read_object(run / "summary.json")
    if summary is None:
        raise UserError(f"{run} holds no finished run (it has no summary.json): give the folder of one.")
    return summary


def config_of_run(run: Path, summary: dict[str, Any], extra: list[str], *, trusted: bool = False) -> Config:
    """The configuration of a finished run, with the `extra` overrides."""
    return composed_of_run(run, summary, extra, trusted=trusted).config


def composed_of_run(
    run: Path, summary: dict[str, Any], extra: list[str], *, trusted: bool = False
) -> ComposedConfig:
    """The same with its overrides and plain values."""
    try:
        command, had = shlex.split(summary["command"]), dict(summary["config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(run / "summary.json", "it holds no command and configuration") from error
    return stored_config(run, command[1:], had, extra, trusted=trusted).continuing()


def load_run(run: Path, extra: list[str], *, trusted: bool = False) -> Worker:
    """The run's model and data, loaded. `trusted`: also external data and models that only the folder names
    (`outside.py`)."""
    summary = finished(run)
    model, marks = read_arrays(run / "model.safetensors")
    if not manifest.is_recorded(run):
        log.warning("%s has no manifest, as runs of older versions: its files are read unchecked.", run)
    config = config_of_run(run, summary, extra, trusted=trusted)
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))
    if not (worker.has_global or shares_model(config, worker.exchanged, worker.roles)):
        raise UserError(
            f"The clients of {run} shared nothing, or parts of a model alone, so that it has no model of its "
            "own: how each of theirs does is in its personal.json, which a run with personal=true writes."
        )
    worker.check_marks(marks)
    check_fits(model, worker.exchanged)
    worker.load(model, {})
    return worker


def check_place(job: Job) -> None:
    """Check that the job can write its results."""
    check_installed(job.config.track)
    check_writable(job.folder)


def check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path | str, error: OSError) -> UserError:
    return UserError(
        f"The output folder {folder} cannot be written ({error.strerror}): "
        "set output_dir=DIR to one that can."
    )
