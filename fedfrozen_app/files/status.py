"""`status.json`: how a run stands, for whoever looks at its folder from another process.

A launcher runs the members of a sweep in processes of its own, so what became of them is read from here.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.lease import Owner, alone, holder

FILE = "status.json"
LONGEST = 500  # characters of a reason


class Detached(Exception):
    """The run goes on without this process."""


class SweepFailed(RunFailed):
    """Some runs of a sweep are not complete."""


@dataclass(frozen=True)
class Status:
    digest: str  # of the resolved configuration
    overrides: list[str]
    state: str = "running"  # running | complete | failed | interrupted
    reason: str = ""  # why it is not complete
    bad_input: bool = False  # the reason is something that the person at the keyboard can mend
    sweep: str = ""  # the latest sweep that asked for this run
    kept: bool = False  # that sweep found it complete
    host: str = ""
    boot: str = ""
    pid: int = 0
    began: int = 0
    started: str = ""
    ended: str = ""
    flower_run: int = 0  # Flower's number of it, where it was handed in to a SuperLink

    @property
    def alive(self) -> bool:
        """Whether its process is still there, as far as this machine can tell."""
        return self.state == "running" and Owner(self.host, self.boot, self.pid, self.began).alive


def digest_of(resolved_config: Mapping[str, Any]) -> str:
    """The same for the same resolved configuration, whatever the run is called, wherever its results go."""
    settings = {
        key: value
        for key, value in resolved_config.items()
        if key not in ("run_id", "output_dir", "overwrite", "track")
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Status | None:
    """None where no run ever began, or where its file is damaged."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        known = {field.name for field in fields(Status)}
        return Status(**{key: value for key, value in found.items() if key in known})
    except (OSError, json.JSONDecodeError, TypeError, AttributeError):
        return None


def new_status(
    resolved_config: Mapping[str, Any], overrides: list[str], sweep: str = "", owner: Owner | None = None
) -> Status:
    """Of a run that this process is about to start."""
    me = owner or Owner.of(os.getpid())
    return Status(digest_of(resolved_config), overrides, sweep=sweep, started=now(), **asdict(me))


def create(folder: Path, status: Status) -> bool:
    """Whether the folder was free: whoever makes the file first has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / FILE).open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(status), indent=2))
    except FileExistsError:
        return False
    return True


def write(folder: Path, status: Status) -> None:
    replace_file(folder / FILE, json.dumps(asdict(status), indent=2))


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def recorded(
    folder: Path, resolved_config: Mapping[str, Any], overrides: list[str], sweep: str = ""
) -> Iterator[None]:
    """Keep `status.json` true while the block runs, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        check_unowned(folder)
        write(folder, new_status(resolved_config, overrides, sweep))
    with concluded(folder):
        yield


def check_unowned(folder: Path) -> None:
    """A run has one owner: raises where another process works on the one in this folder."""
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
    begun = read(folder)
    end: tuple[str, str, bool] | None = ("complete", "", False)
    try:
        yield
    except Detached:
        end = None
        raise
    except BaseException as error:
        # Ctrl-C after the last file was written interrupts nothing.
        if not (isinstance(error, KeyboardInterrupt) and _has_completed(folder)):
            end = _judge(error)
        raise
    finally:
        if end is not None and begun is not None:
            _conclude(folder, begun.started, *end)


def _conclude(folder: Path, started: str, state: str, reason: str, bad_input: bool) -> None:
    with alone(folder):
        status = read(folder)
        if status is not None and status.started == started:  # not one that somebody has resumed since
            write(folder, replace(status, state=state, reason=reason, bad_input=bad_input, ended=now()))


def settle(folder: Path, state: str) -> None:
    """For a run whose own process was given no time to say how it ended."""
    found = read(folder)
    if found is not None and found.state == "running":
        _conclude(folder, found.started, "complete" if _has_completed(folder) else state, "", False)


def handed_in(folder: Path, flower_run: int) -> None:
    """Note under which number Flower knows the run, for whoever looks for it there."""
    with alone(folder):
        if (status := read(folder)) is not None:
            write(folder, replace(status, flower_run=flower_run))


def taken_over(folder: Path, flower_run: int, patience: float) -> bool:
    """For the process that Flower started: whether the run in the folder is its own, and so recorded."""
    deadline = time.monotonic() + patience  # the command that handed it in may not have noted that yet
    while (found := read(folder)) is None or found.flower_run != flower_run:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    with alone(folder):
        write(folder, replace(found, state="running", **asdict(Owner.of(os.getpid()))))
    return True


def _judge(error: BaseException) -> tuple[str, str, bool]:
    """State, reason, and whether it is bad input."""
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Flower exits from a run that was stopped
        return "interrupted", "", False
    reason = " ".join(str(error).split())
    if len(reason) > LONGEST:  # a sentence, and a log after it, which lies in its own file
        reason = " ".join(str(error).strip().splitlines()[0].split())
    if not isinstance(error, UserError):
        reason = f"{type(error).__name__}: {reason}".rstrip(": ")
    if len(reason) > LONGEST:
        reason = reason[: LONGEST - 1] + "…"
    return "failed", reason, isinstance(error, UserError)


def _has_completed(folder: Path) -> bool:
    """Its summary is of this run: a run removes an older one when it begins."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return found["status"] in ("completed", "stopped early")
    except (OSError, ValueError, KeyError, TypeError):
        return False
