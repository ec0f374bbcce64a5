"""One run of a sweep: find its folder, keep what is complete, go on with what is not."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fedfrozen_app.config import Config, device_of, read, stack_runs, with_absolute_paths
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.launch import check_place, execute, execute_side_by_side
from fedfrozen_app.local.resident import same_shape
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.report.sweep_clock import run_ended
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.sweep.sweep_table import ASKED

log = logging.getLogger(__name__)
TOKEN = "FEDFROZEN_SWEEP"  # the environment variable that tells a member which sweep asked for it


@dataclass(frozen=True)
class Asked:
    """A run that a sweep asks for."""

    resolved_config: dict[str, Any]
    overrides: list[str]
    wanted: Path  # its folder, if no other run has it


def member(composed: DictConfig, later: list[Asked] | None = None) -> float | None:
    """What Hydra's launchers call, in whichever process: the figure to optimise, None for a failed run.

    What may train side by side with others is added to `later` instead, where that is given.
    """
    prepare_logging()  # a launcher's process begins without it
    logging.getLogger("flwr").setLevel(logging.WARNING)
    settings = HydraConfig.get()
    log.info("Run %s: %s", settings.job.num, " ".join(settings.overrides.task))
    wanted = Path(settings.runtime.output_dir).resolve()
    asked = Asked(*with_absolute_paths(composed, settings.overrides.task), wanted)
    # Other launchers have other processes, and other sweepers wait for the figure.
    basic = all("BasicLauncher" in part or "BasicSweeper" in part for part in targets(settings))
    if later is not None and basic and may_stack(asked):
        later.append(asked)
        return None
    return run_member(asked, os.environ.get(TOKEN, ""))


def targets(settings: Any) -> tuple[str, str]:
    return str(settings.launcher["_target_"]), str(settings.sweeper["_target_"])


def may_stack(asked: Asked) -> bool:
    """Whether this run asks for others beside it; one that cannot run at all is told so on its own."""
    try:
        config = read(asked.resolved_config)
    except UserError:
        return False
    if config.runtime.name != "inprocess":
        return False
    wish = stack_runs(config)
    return device_of(config.device).type == "cuda" if wish is None else wish > 1


def run_member(asked: Asked, sweep: str, *, wait: bool = False) -> float | None:
    """Run it in its folder, or beside it if another run has that. Failures stay in its status file.

    What another process runs at this moment is left to it; with `wait` its end is waited for.
    """
    folder, state = open_folder(asked, sweep)
    if wait and state == "left alone":
        wait_for_others([folder])
        folder, state = open_folder(asked, sweep)
    if state == "left alone":
        return None
    if state == "complete":
        run_ended(kept=True)
    else:
        try:
            with status.recorded(folder, asked.resolved_config, asked.overrides, sweep):
                execute(job_of(asked, folder))
        except (UserError, RunFailed) as error:
            log.warning("%s failed: %s", folder, error)
            return None
        finally:
            run_ended()
    return objective(folder)


def run_members(asked: Sequence[Asked], sweep: str) -> None:
    """The same for many: those of one shape side by side."""
    shapes: list[list[tuple[Asked, Job]]] = []
    for one in asked:
        folder, state = open_folder(one, sweep)
        if state != "to do":
            run_ended(kept=True)
            continue
        try:
            job = job_of(one, folder)
            check_place(job)
        except UserError:
            run_member(one, sweep)  # which keeps a record of why
            continue
        for shape in shapes:
            if same_shape(shape[0][1].config, job.config):
                shape.append((one, job))
                break
        else:
            shapes.append([(one, job)])
    for shape in shapes:
        if len(shape) == 1:
            run_member(shape[0][0], sweep)
            continue
        jobs = [job for _, job in shape]
        for job, error in zip(jobs, execute_side_by_side(jobs, partial(recorded, sweep)), strict=True):
            run_ended()
            if error is None:
                continue
            if not isinstance(error, UserError | RunFailed):
                raise error
            log.warning("%s failed: %s", job.folder, error)


def recorded(sweep: str, job: Job) -> AbstractContextManager[None]:
    return status.recorded(job.folder, job.resolved_config, job.overrides, sweep)


def open_folder(asked: Asked, sweep: str) -> tuple[Path, str]:
    """The run's folder, and whether it is "complete", "to do", or another process's and "left alone"."""
    folder = claim(asked.wanted, status.new_status(asked.resolved_config, asked.overrides, sweep))
    note_asked(folder, sweep)
    before = status.read(folder)
    if before is not None and before.state == "complete":
        if before.sweep != sweep:  # a second look at a run of this sweep's own
            status.write(folder, replace(before, sweep=sweep, kept=True))
        log.info("%s is complete and was kept.", folder)
        return folder, "complete"
    if is_others(before):
        # Not recorded: the file is the other process's.
        log.info("%s is being run by process %d: left to it.", folder, before.pid if before else 0)
        return folder, "left alone"
    return folder, "to do"


def job_of(asked: Asked, folder: Path) -> Job:
    config, start = starting_point(read(asked.resolved_config), folder)
    return Job(config, asked.resolved_config, asked.overrides, folder, start)


def note_asked(folder: Path, sweep: str) -> None:
    """Beside the runs, because the status file of one that others run is theirs."""
    place = folder.parent / ASKED
    place.mkdir(exist_ok=True)
    with (place / (sweep or "alone")).open("a", encoding="utf-8") as file:
        file.write(f"{folder.name}\n")


def is_others(found: status.Status | None) -> bool:
    """Whether another process runs this at the moment."""
    return found is not None and found.alive and found.pid != os.getpid()


def wait_for_others(folders: list[Path]) -> None:
    """Until no other process runs any of these; says for whom."""
    told: set[int] = set()
    while busy := {f: found.pid for f in folders if is_others(found := status.read(f)) and found}:
        if new := sorted(set(busy.values()) - told):
            told.update(new)
            names = ", ".join(sorted(folder.name for folder in busy))
            log.info("Waiting for process %s, which runs %s.", ", ".join(map(str, new)), names)
        time.sleep(1)


def claim(wanted: Path, new: status.Status) -> Path:
    """The folder in which this configuration was begun, or else one that no other run has."""
    for path in sorted(wanted.parent.glob(f"*/{status.FILE}")):
        found = status.read(path.parent)
        if found is not None and found.digest == new.digest:
            return path.parent
    numbered = (wanted.parent / str(number) for number in count())
    # Hydra numbers every sweep from 0: a folder may be that of another configuration.
    for folder in chain([wanted], numbered):
        if not (folder / "metrics.jsonl").exists() and status.create(folder, new):
            return folder
    raise AssertionError("numbers do not end")


def starting_point(config: Config, folder: Path) -> tuple[Config, checkpoint.Checkpoint | None]:
    """Where to go on: the newest checkpoint of an earlier attempt, else what the configuration says."""
    # What clients keep for themselves is lost with a simulation's processes: those start again.
    if config.runtime.name == "inprocess" and checkpoint.numbers(folder / "checkpoints"):
        start = checkpoint.newest(folder)
        log.info("Going on after round %d.", start.round)
        return replace(config, start_from=None), start  # a fork goes on from its own rows, not its origin's
    return config, fork_start(config)


def objective(folder: Path) -> float | None:
    """The best accuracy on validation rows: the server's, or else the clients' own. Never the test set's."""
    rows = [row for row in read_rows(folder) if row["round"] > 0]
    for key in ("val_accuracy", "client_val_after"):
        if values := [row[key] for row in rows if key in row]:
            return max(values)
    return None
