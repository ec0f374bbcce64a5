"""One run of a sweep: find its folder, keep it if complete, otherwise continue it."""

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

from fedfrozen_app.config import ComposedConfig, device_of, stack_runs
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.files import checkpoint, lease, status
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.integrity import check_folder, mend_manifest
from fedfrozen_app.files.readers import Damaged
from fedfrozen_app.files.rows import metric_name, read_rows, whole_rows
from fedfrozen_app.launch import check_place, execute, execute_side_by_side
from fedfrozen_app.local.reuse import same_shape
from fedfrozen_app.report.sweep_clock import run_ended
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.sweep.sweep_table import ASKED

log = logging.getLogger(__name__)
TOKEN = "FEDFROZEN_SWEEP"  # the environment variable that names a member's sweep


@dataclass(frozen=True)
class Asked:
    """A run that a sweep requests."""

    composed: ComposedConfig
    wanted: Path  # its folder, unless another run occupies it


def member(composed: DictConfig, later: list[Asked] | None = None) -> float | None:
    """Called by Hydra's launchers, in any process: returns the metric to optimise, None for a failed run.

    With `later`, a run that may train together with others is added to it instead.
    """
    prepare_logging()  # not inherited by a launcher's process
    logging.getLogger("flwr").setLevel(logging.WARNING)
    settings = HydraConfig.get()
    log.info("Run %s: %s", settings.job.num, " ".join(settings.overrides.task))
    wanted = Path(settings.runtime.output_dir).resolve()
    asked = Asked(ComposedConfig.of(composed, settings.overrides.task).with_absolute_paths(), wanted)
    # Other launchers use other processes, and other sweepers need the metric.
    basic = all("BasicLauncher" in part or "BasicSweeper" in part for part in targets(settings))
    if later is not None and basic and may_stack(asked):
        later.append(asked)
        return None
    return run_member(asked, os.environ.get(TOKEN, ""))


def targets(settings: Any) -> tuple[str, str]:
    return str(settings.launcher["_target_"]), str(settings.sweeper["_target_"])


def may_stack(asked: Asked) -> bool:
    """Whether this run may train together with others. A bad configuration fails later, on its own."""
    try:
        config = asked.composed.config
    except UserError:
        return False
    if config.runtime.name != "inprocess":
        return False
    wish = stack_runs(config)
    return device_of(config.device).type == "cuda" if wish is None else wish > 1


def run_member(asked: Asked, sweep: str, *, wait: bool = False) -> float | None:
    """Run it in its folder, or in the next one if another run has that. Failures are kept in its status file.

    A run that another process is working on is left to it; with `wait`, this waits for its end.
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
            with status.recorded(folder, asked.composed.resolved, asked.composed.overrides, sweep):
                execute(job_of(asked, folder))
        except (UserError, RunFailed) as error:
            log.warning("%s failed: %s", folder, error)
            return None
        finally:
            run_ended()
    return objective(folder)


def run_members(asked: Sequence[Asked], sweep: str) -> None:
    """Run many: runs with the same shapes train together."""
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
            run_member(one, sweep)  # which records the failure
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
    composed = asked.composed
    folder = claim(asked.wanted, status.new_status(composed.resolved, composed.overrides, sweep))
    note_asked(folder, sweep)
    before = status.read(folder)
    if not is_others(before) and (mended := mend_manifest(folder)):
        log.warning("%s: %s", folder, mended)
    if before is not None and before.state == "complete" and (damage := damaged(folder)):
        log.warning("%s: %s, so its results are written again.", folder, damage)
    elif before is not None and before.state == "complete":
        if before.sweep != sweep:  # not on a second look at this sweep's own run
            status.write(folder, replace(before, sweep=sweep, kept=True))
        log.info("%s is complete and was kept.", folder)
        return folder, "complete"
    if is_others(before):
        # Not recorded: the file belongs to the other process.
        log.info("%s is being run by process %d: left to it.", folder, before.pid if before else 0)
        return folder, "left alone"
    return folder, "to do"


def damaged(folder: Path) -> str:
    """The damaged results of a complete run; "" if there are none."""
    found = [one for one in check_folder(folder) if one.is_bad and not one.name.startswith("checkpoints/")]
    return ", ".join(f"{one.name} is {one.state}" for one in found)


def job_of(asked: Asked, folder: Path) -> Job:
    composed, start = starting_point(asked.composed, folder)
    return Job(composed, folder, start)


def note_asked(folder: Path, sweep: str) -> None:
    """Record the request next to the runs: the status file of a run in another process belongs to that
    one."""
    if not manifest.is_recorded(folder.parent):
        manifest.begin(folder.parent, manifest.SWEEP)
    place = folder.parent / ASKED
    place.mkdir(exist_ok=True)
    with (place / (sweep or "alone")).open("a", encoding="utf-8") as file:
        file.write(f"{folder.name}\n")


def is_others(found: status.Status | None) -> bool:
    """Whether another process is running this."""
    return found is not None and found.alive and found.pid != os.getpid()


def wait_for_others(folders: list[Path]) -> None:
    """Wait until no other process runs any of these; logs which ones."""
    logged: set[int] = set()
    while busy := {f: found.pid for f in folders if is_others(found := status.read(f)) and found}:
        if new := sorted(set(busy.values()) - logged):
            logged.update(new)
            names = ", ".join(sorted(folder.name for folder in busy))
            log.info("Waiting for process %s, which runs %s.", ", ".join(map(str, new)), names)
        time.sleep(1)


def claim(wanted: Path, new: status.Status) -> Path:
    """The folder in which this configuration was started, or else a free one."""
    known = {path.parent for name in (status.FILE, manifest.FILE) for path in wanted.parent.glob(f"*/{name}")}
    for folder in sorted(known):
        if known_digest(folder) == new.digest:
            if status.read(folder) is None:
                what = "damaged" if (folder / status.FILE).exists() else "missing"
                log.warning("%s was %s and is written again.", folder / status.FILE, what)
                status.write(folder, replace(new, state="interrupted"))
            return folder
    numbered = (wanted.parent / str(number) for number in count())
    # Hydra numbers every sweep from 0: a folder may be that of another configuration.
    for folder in chain([wanted], numbered):
        if half_written(folder):
            (folder / status.FILE).unlink(missing_ok=True)
        if not (folder / "metrics.jsonl").exists() and status.create(folder, new):
            return folder
    raise AssertionError("numbers do not end")


def known_digest(folder: Path) -> str | None:
    """The digest of the run's configuration, from its status file or, if damaged, from its manifest."""
    if (found := status.read(folder)) is not None:
        return found.digest
    try:
        known = manifest.read(folder)
    except OSError:
        return None
    return None if known is None else known.header.get("digest")


def half_written(folder: Path) -> bool:
    """Whether a full disk or a kill ended the run before it wrote anything, so that nothing is lost."""
    return (
        status.damage(folder) is not None
        and known_digest(folder) is None
        and lease.holder(folder) is None
        and not checkpoint.numbers(folder / "checkpoints")
        and not any((folder / name).exists() for name in ("metrics.jsonl", "summary.json"))
    )


def starting_point(
    composed: ComposedConfig, folder: Path
) -> tuple[ComposedConfig, checkpoint.Checkpoint | None]:
    """The newest checkpoint of an earlier attempt, else the configuration's start."""
    # Client state is lost with a simulation's processes: such runs start over.
    if composed.config.runtime.name in ("inprocess", "ray") and checkpoint.numbers(folder / "checkpoints"):
        try:
            if damage := whole_rows(folder).damage:  # a comparison needs all rows
                raise Damaged(folder / "metrics.jsonl", damage)
            start = checkpoint.newest(folder)
        except UserError as error:
            log.warning("%s begins again: %s", folder, error)
        else:
            log.info("Going on after round %d.", start.round)
            return composed.continuing(), start
    return composed, fork_start(composed.config)


def objective(folder: Path) -> float | None:
    """The best metric on validation rows: the server's, or else the clients' own. Never the test set's."""
    try:
        rows = [row for row in read_rows(folder) if row["round"] > 0]
    except UserError as error:
        log.warning("%s", error)
        return None
    for key in (f"val_{metric_name(rows)}", "client_val_after"):
        if values := [row[key] for row in rows if key in row]:
            return max(values)
    return None
