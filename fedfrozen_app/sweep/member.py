"""One run of a sweep: find its folder, keep what is complete, go on with what is not."""

import logging
import os
import time
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fedfrozen_app.config import Config, read, with_absolute_paths
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.launch import execute
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.run.job import Job, fork_start

log = logging.getLogger(__name__)
ASKED = ".sweeps"  # in a sweep's folder: for each sweep that is going on, which runs it asked for
TOKEN = "FEDFROZEN_SWEEP"  # the environment variable that tells a member which sweep asked for it


def member(composed: DictConfig) -> float | None:
    """What Hydra's launchers call, in whichever process: the figure to optimise, None for a failed run."""
    prepare_logging()  # a launcher's process begins without it
    logging.getLogger("flwr").setLevel(logging.WARNING)
    settings = HydraConfig.get()
    log.info("Run %s: %s", settings.job.num, " ".join(settings.overrides.task))
    wanted = Path(settings.runtime.output_dir).resolve()
    resolved_config, overrides = with_absolute_paths(composed, settings.overrides.task)
    return run_member(resolved_config, overrides, wanted, os.environ.get(TOKEN, ""))


def run_member(
    resolved_config: dict[str, Any], overrides: list[str], wanted: Path, sweep: str, *, wait: bool = False
) -> float | None:
    """Run it in `wanted`, or beside it if another run has that folder. Failures stay in its status file.

    What another process runs at this moment is left to it; with `wait` its end is waited for.
    """
    folder = claim(wanted, status.new_status(resolved_config, overrides, sweep))
    note_asked(folder, sweep)
    if wait:
        wait_for_others([folder])
    before = status.read(folder)
    if before is not None and before.state == "complete":
        if before.sweep != sweep:  # a second look at a run of this sweep's own
            status.write(folder, replace(before, sweep=sweep, kept=True))
        log.info("%s is complete and was kept.", folder)
        return objective(folder)
    if is_others(before):
        log.info("%s is being run by process %d: left to it.", folder, before.pid if before else 0)
        return None
    try:
        with status.recorded(folder, resolved_config, overrides, sweep):
            config, start = starting_point(read(resolved_config), folder)
            execute(Job(config, resolved_config, overrides, folder, start))
    except (UserError, RunFailed) as error:
        log.warning("%s failed: %s", folder, error)
        return None
    return objective(folder)


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
