"""`lease.json`: the process that writes into a run's folder. A run has one owner.

A process is identified by its machine's boot id and its start time on that boot's clock, so neither a clock
change nor a reused process id causes confusion.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.disk import replace_file

log = logging.getLogger(__name__)
FILE = "lease.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")
ENDED = "ZX"  # states of a process that has ended but is still in the table
START_TIME = 19  # its index in /proc/PID/stat, after the command's name


@dataclass(frozen=True)
class Owner:
    host: str = ""
    boot: str = ""  # "" if the system does not report it
    pid: int = 0
    began: int = 0  # clock ticks after boot; 0 if the system does not report it

    @classmethod
    def of(cls, pid: int) -> "Owner":
        return cls(socket.gethostname(), _boot(), pid, _began(pid))

    @property
    def alive(self) -> bool:
        """Whether its process still exists, as far as this machine can tell."""
        if not self.pid or self.host != socket.gethostname() or (self.boot and self.boot != _boot()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, but it exists
            pass
        return not self.began or self.began == _began(self.pid)  # 0: it has ended

    @property
    def is_me(self) -> bool:
        return self.pid == os.getpid() and self.alive


def holder(folder: Path) -> Owner | None:
    """The process that currently writes into the folder, or None."""
    owner = _recorded(folder)
    return owner if owner is not None and owner.alive else None


def lost(folder: Path) -> Owner | None:
    """The process that wrote into the folder and ended without releasing it: it was killed. None for a
    process of another machine or container, whose state is unknown here."""
    owner = _recorded(folder)
    here = owner is not None and owner.host == socket.gethostname() and owner.boot == _boot()
    return owner if here and owner is not None and not owner.alive else None


def _recorded(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def held(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Within the block no other process writes into the folder. Waits up to `patience` for another to end."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline, logged = time.monotonic() + patience, False
    while True:
        with alone(folder):
            other = holder(folder)
            if other is None or other.is_me:
                replace_file(folder / FILE, json.dumps(asdict(Owner.of(os.getpid()))))
                break
        if time.monotonic() >= deadline:
            raise UserError(
                f"{folder} is written by process {other.pid}: wait for its end, or give another output_dir."
            )
        if not logged:
            log.info("Waiting for process %d, which still writes into %s.", other.pid, folder)
            logged = True
        time.sleep(0.2)
    try:
        yield
    finally:
        (folder / FILE).unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A lock for a check and the action that follows it: a second process waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> int:
    """The start time of a process; 0 if unknown, or if it has ended (a zombie keeps its process id)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    words = text.rpartition(")")[2].split()
    return 0 if words[0] in ENDED else int(words[START_TIME])
