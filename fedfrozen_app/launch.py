"""Carry out a job in the runtime it names, and load what a finished one left."""

import importlib
import json
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.disk import header
from fedfrozen_app.files.seal import DAMAGED
from fedfrozen_app.inprocess.stacked import Bench, run_stacked, runs_at_once
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.report.console import show_end
from fedfrozen_app.report.track import check_installed
from fedfrozen_app.run.job import Job, as_it_was
from fedfrozen_app.run.outline import shares_model
from fedfrozen_app.run.prepare import check_fits
from fedfrozen_app.server.sampling import cohort_size

log = logging.getLogger(__name__)
# Imported when one is chosen: Flower's own command line takes the better part of a second.
RUNTIMES = {
    "inprocess": "fedfrozen_app.inprocess.runtime:run_in_process",
    "flower": "fedfrozen_app.flower.simulated:run_with_flower",
    "deployed": "fedfrozen_app.flower.deployed:run_deployed",
}


def execute(job: Job) -> dict[str, Any]:
    """Run in the chosen runtime, and show how it ended."""
    check_place(job)
    try:
        module, _, function = RUNTIMES[job.config.runtime.name].partition(":")
        summary = getattr(importlib.import_module(module), function)(job)
    except KeyboardInterrupt:
        state = checkpoint.newest_state(job.folder)
        lost = job.config.runtime.name == "flower" and state is not None and state["hooks"].get("private")
        again = f" Go on with: fedfrozen resume {shlex.quote(str(job.folder))}" if state and not lost else ""
        print(f"Interrupted. What was done is in {job.folder}.{again}", file=sys.stderr)
        raise
    show_end(summary, job.folder)
    return summary


def execute_side_by_side(
    jobs: Sequence[Job], within: Callable[[Job], AbstractContextManager[Any]]
) -> list[BaseException | None]:
    """The same for jobs of one shape, as many at a time as `runtime.stack_runs` says: why each failed, or
    None. `within` surrounds each of them."""
    bench = Bench(load_corpus(jobs[0].config), 1)
    resident = bench.resident(0, jobs[0])
    parts = resident.shares.partition
    assert parts is not None
    cohort = cohort_size(jobs[0].config.participation, len(parts.indices))
    size = min(runs_at_once(resident, cohort), len(jobs))
    bench.stack.runs = size
    log.info("%d runs of one shape, up to %d side by side: the bar is the first one's.", len(jobs), size)
    # They advance together: one bar tells of all.
    jobs = [replace(job, shown=number % size == 0) for number, job in enumerate(jobs)]
    found = run_stacked(jobs, bench, within)
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
    return run, arguments[1:]


def load_run(run: Path, extra: list[str]) -> Resident:
    """The run's model and data, loaded."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        command, had = shlex.split(summary["command"]), summary["config"]
        model = load_file(run / "model.safetensors")
    except (SafetensorError, *DAMAGED) as error:
        raise UserError(f"{run} holds no finished run ({error}): give the folder of one.") from error
    config = read(resolved(compose_config(as_it_was(command[1:], had) + extra)) | {"from": None})
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))
    if not (resident.has_global or shares_model(config, resident.exchanged, resident.roles)):
        raise UserError(
            f"The clients of {run} shared nothing, or parts of a model alone, so that it has no model of its "
            "own: how each of theirs does is in its personal.json, which a run with personal=true writes."
        )
    check_fits(model, resident.exchanged)
    resident.wrapper.check_marks(header(run / "model.safetensors"))
    resident.load(model, {})
    return resident


def check_place(job: Job) -> None:
    """Whether the job can leave its results."""
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
