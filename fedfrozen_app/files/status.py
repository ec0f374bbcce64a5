"""`status.json`: the state of a run, for other processes.

A launcher runs the members of a sweep in other processes, so their outcomes are read from here.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import DAMAGED, RunFailed, UserError
from fedfrozen_app.files import disk
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.lease import Owner, alone, holder
from fedfrozen_app.files.readers import Damaged, read_object
from fedfrozen_app.files.seal import SEAL, opened, sealed

log = logging.getLogger(__name__)
FILE = "status.json"
LONGEST = 500  # characters of a reason


class Detached(Exception):
    """The run continues without this process."""


class SweepFailed(RunFailed):
    """Some runs of a sweep are not complete."""


@dataclass(frozen=True)
class Status:
    digest: str = ""  # of the resolved configuration
    overrides: list[str] = field(default_factory=list)
    state: str = "running"  # running | complete | failed | interrupted
    reason: str = ""  # why it is not complete
    bad_input: bool = False  # the user can fix the reason
    sweep: str = ""  # the latest sweep that requested this run
    kept: bool = False  # that sweep found it complete
    host: str = ""
    boot: str = ""
    pid: int = 0
    began: int = 0
    started: str = ""
    ended: str = ""
    flower_run: int = 0  # Flower's run id, if submitted to a SuperLink

    @property
    def alive(self) -> bool:
        """Whether its process still exists, as far as this machine can tell."""
        return self.state == "running" and Owner(self.host, self.boot, self.pid, self.began).alive


USUAL = asdict(Status())


def digest_of(resolved_config: Mapping[str, Any]) -> str:
    """A digest of the resolved configuration, independent of the run's name and output folder."""
    settings = {
        key: value
        for key, value in resolved_config.items()
        if key not in ("run_id", "output_dir", "overwrite", "track")
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Status | None:
    """Read the status; None if no run ever started, or the file is damaged (see `damage`)."""
    try:
        return _read(folder)
    except DAMAGED:
        return None


def damage(folder: Path) -> Damaged | None:
    """What is wrong with the file; None if it is intact or missing."""
    try:
        _read(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DAMAGED as error:
        if isinstance(error, OSError):
            return Damaged(folder / FILE, f"it cannot be read: {error.strerror}")
        return Damaged(folder / FILE, "it is not as it was written")
    return None


def _read(folder: Path) -> Status:
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if SEAL in found:  # runs of older versions have none
        found = opened(found, FILE)
    if not {"state", "reason"} & found.keys():
        raise ValueError("it holds no state")
    status = Status(**{key: value for key, value in found.items() if key in USUAL})
    for key, value in USUAL.items():
        if type(getattr(status, key)) is not type(value):
            raise ValueError(f"{key} is of another kind")
    if not all(isinstance(word, str) for word in status.overrides):
        raise ValueError("overrides is no list of words")
    return status


def new_status(
    resolved_config: Mapping[str, Any], overrides: list[str], sweep: str = "", owner: Owner | None = None
) -> Status:
    """The status of a run that this process is about to start."""
    me = owner or Owner.of(os.getpid())
    return Status(digest_of(resolved_config), overrides, sweep=sweep, started=now(), **asdict(me))


def create(folder: Path, status: Status) -> bool:
    """Create the status file. Returns whether the folder was free: the first process gets it."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{FILE}.{os.getpid()}.part"
    try:
        part.write_text(_text(status), encoding="utf-8")
        disk.flush(part)
        os.link(part, folder / FILE)  # atomic; fails if the file exists
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    manifest.begin(folder, manifest.RUN, digest=status.digest, overrides=status.overrides)
    return True


def write(folder: Path, status: Status) -> None:
    replace_file(folder / FILE, _text(status))


def _text(status: Status) -> str:
    return json.dumps(json.loads(sealed(asdict(status))), indent=2)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def recorded(
    folder: Path, resolved_config: Mapping[str, Any], overrides: list[str], sweep: str = ""
) -> Iterator[None]:
    """Keep `status.json` up to date while the block runs and however it ends."""
    new = new_status(resolved_config, overrides, sweep)
    with sentence_if_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            check_unowned(folder)
            disk.reserve(folder)
            manifest.begin(folder, manifest.RUN, digest=new.digest, overrides=new.overrides)
            write(folder, new)
    try:
        with concluded(folder):
            yield
    finally:
        disk.release(folder)


@contextmanager
def sentence_if_full(folder: Path) -> Iterator[None]:
    """Turn a full disk at the start of a run into a one-sentence error; repeating the command starts it
    again."""
    try:
        yield
    except OSError as error:
        disk.release(folder)
        change = "make room there" if disk.is_full(error) else "correct that"
        raise RunFailed(
            f"{folder} could not be written ({error.strerror or error}): {change}, then give the same "
            "command again."
        ) from error


def check_unowned(folder: Path) -> None:
    """A run has one owner: raises if another process works on the run in this folder."""
    before, writer = read(folder), holder(folder)
    busy = before.pid if before is not None and before.alive else writer.pid if writer is not None else 0
    if busy and busy != os.getpid():
        attach = f"watch it with fedfrozen attach {folder}, " if before and before.flower_run else ""
        raise UserError(
            f"{folder} is being run by process {busy}: {attach}wait for its end, or give another output_dir."
        )


@contextmanager
def concluded(folder: Path) -> Iterator[None]:
    """Write into the status file how the block ended."""
    before = read(folder)
    end: tuple[str, str, bool] | None = ("complete", "", False)
    try:
        yield
    except Detached:
        end = None
        raise
    except BaseException as error:
        # Ctrl-C after the last file was written interrupts nothing.
        if not (isinstance(error, KeyboardInterrupt) and _has_completed(folder)):
            end = _state_of(error)
        raise
    finally:
        if end is not None and before is not None:
            _conclude(folder, before.started, *end)


def _conclude(folder: Path, started: str, state: str, reason: str, bad_input: bool) -> None:
    try:
        with alone(folder):
            status = read(folder)
            if status is not None and status.started == started:  # not if it has been resumed since
                ended = not_before(now(), started)
                new = replace(status, state=state, reason=reason, bad_input=bad_input, ended=ended)
                _write_last(folder, new)
    except OSError as error:  # the terminal shows the outcome too
        log.warning(
            "%s could not be written (%s): it still says that the run is going.",
            *(folder / FILE, error.strerror or error),
        )


def _write_last(folder: Path, status: Status) -> None:
    """Write the final status; on a full disk, into the reserved space."""
    try:
        write(folder, status)
    except OSError as error:
        if not (disk.is_full(error) and disk.release(folder)):
            raise
        write(folder, status)


def not_before(moment: str, earliest: str) -> str:
    """The later of two moments: the clock may have been set back in between."""
    try:
        return max(moment, earliest, key=datetime.fromisoformat)
    except (ValueError, TypeError):  # a record of another version
        return moment


def settle(folder: Path, state: str) -> None:
    """Set the final state of a run whose process could not write it."""
    found = read(folder)
    if found is not None and found.state == "running":
        _conclude(folder, found.started, "complete" if _has_completed(folder) else state, "", False)


def handed_in(folder: Path, flower_run: int) -> None:
    """Record Flower's id of the run."""
    with alone(folder):
        if (status := read(folder)) is not None:
            write(folder, replace(status, flower_run=flower_run))


def taken_over(folder: Path, flower_run: int, patience: float) -> bool:
    """For the process that Flower started: whether the run in the folder is its own, and record it as
    owner."""
    deadline = time.monotonic() + patience  # the submitting command may not have recorded it yet
    while (found := read(folder)) is None or found.flower_run != flower_run:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    with alone(folder):
        write(folder, replace(found, state="running", **asdict(Owner.of(os.getpid()))))
    return True


def _state_of(error: BaseException) -> tuple[str, str, bool]:
    """State, reason, and whether it is bad input."""
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Flower exits when a run is stopped
        return "interrupted", "", False
    reason = " ".join(str(error).split())
    if len(reason) > LONGEST:  # a sentence followed by a log, which is in its own file
        reason = " ".join(str(error).strip().splitlines()[0].split())
    if not isinstance(error, UserError):
        reason = f"{type(error).__name__}: {reason}".rstrip(": ")
    if len(reason) > LONGEST:
        reason = reason[: LONGEST - 1] + "…"
    return "failed", reason, isinstance(error, UserError)


def _has_completed(folder: Path) -> bool:
    """Whether there is a summary: it belongs to this run, since a run removes an older one at its start."""
    try:
        found = read_object(folder / "summary.json") or {}
    except UserError:
        return False
    return found.get("status") in ("completed", "stopped early")
