"""`status.json`: how a run stands, for whoever looks at its folder from another process.

A launcher runs the members of a sweep in processes of its own, so what became of them is read from here.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.files.disk import replace_file

FILE = "status.json"


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
    pid: int = 0
    started: str = ""
    ended: str = ""

    @property
    def alive(self) -> bool:
        """Whether its process is still there, as far as this machine can tell."""
        if self.state != "running" or self.host != socket.gethostname() or self._before_boot():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # somebody else's, but there
        return True

    def _before_boot(self) -> bool:
        """Whether the machine was started since, so that its number is another process's by now."""
        if not self.started or not hasattr(time, "CLOCK_BOOTTIME"):
            return False
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return datetime.fromisoformat(self.started).timestamp() < boot


def digest_of(resolved_config: Mapping[str, Any]) -> str:
    """The same for the same resolved configuration, whatever the run is called, wherever its results go."""
    settings = {
        key: value for key, value in resolved_config.items() if key not in ("run_id", "output_dir", "track")
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Status | None:
    """None where no run ever began, or where its file is damaged."""
    try:
        return Status(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError):
        return None


def new_status(resolved_config: Mapping[str, Any], overrides: list[str], sweep: str = "") -> Status:
    """Of a run that this process is about to start."""
    return Status(
        digest_of(resolved_config),
        overrides,
        sweep=sweep,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=now(),
    )


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
    before = read(folder)
    if before is not None and before.alive and before.pid != os.getpid():
        raise UserError(
            f"{folder} is being run by process {before.pid}: wait for its end, or give another output_dir "
            f"(if that process is something else, remove {FILE} there)."
        )
    status = new_status(resolved_config, overrides, sweep)
    write(folder, status)
    try:
        yield
    except BaseException as error:
        reason, stopped = " ".join(str(error).split()), isinstance(error, KeyboardInterrupt)
        described = (
            reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}".rstrip(": ")
        )
        status = replace(
            status,
            state="interrupted" if stopped else "failed",
            reason="" if stopped else described,
            bad_input=isinstance(error, UserError),
        )
        raise
    else:
        status = replace(status, state="complete")
    finally:
        write(folder, replace(status, ended=now()))
