"""Whether the two processes of a site, SuperNode and executor, run and make progress."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.sign import Idleness, Sign, last_sign, processor_time

PARTS = {"supernode": "node", "executor": "exec"}  # and the subcommand that runs it
LOOK = 1.0  # seconds between two checks
WAITING = ("waiting", "alone", "asking", "without room")  # states with a note every few seconds
PHASES = {
    "waiting": "waiting",
    "alone": "waiting",
    "pulling": "receiving",
    "working": "training",
    "without room": "waiting for the disk",
    "pushing": "sending",
}


@dataclass
class Part:
    """The state of one process."""

    up: bool = False
    state: str = ""
    stalled: float = 0.0  # seconds without a note, or without CPU use
    idleness: Idleness = field(default_factory=Idleness)
    stopped: float | None = None  # since when it is stopped, by a debugger or SIGSTOP


@dataclass
class Parts:
    """Reads the notes that both processes write for their watchdogs, once a second."""

    meeting: Path
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of the executor, by phase
    _parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in PARTS})
    _looked: float | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._keep_looking, name="site's parts", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _keep_looking(self) -> None:
        while not self._ended.wait(LOOK):
            self.look()

    def look(self) -> None:
        now = time.monotonic()
        for name, part in self._parts.items():
            try:
                sign = last_sign(self.meeting, name)
            except UserError:  # it is being written
                continue
            self._update(name, part, sign, now)
        executor = self._parts["executor"]
        phase = PHASES.get(executor.state)
        if executor.up and phase is not None and self._looked is not None:
            self.seconds[phase] += now - self._looked
        self._looked = now

    def _update(self, name: str, part: Part, sign: Sign | None, now: float) -> None:
        found = None if sign is None else process_state(sign.pid, PARTS[name])
        part.up = found is not None
        part.state = sign.state if sign is not None and part.up else ""
        part.stalled = 0.0
        if sign is None or not part.up:
            part.stopped = None
            return
        part.stopped = (part.stopped or now) if found == psutil.STATUS_STOPPED else None
        try:
            idle = part.idleness.look(part.state, processor_time(sign.pid))
        except OSError:  # it has just ended
            return
        if part.state == "working":
            part.stalled = idle
        elif part.state in WAITING:
            part.stalled = max(0.0, now - sign.seen)
        if part.stopped is not None:
            part.stalled = max(part.stalled, now - part.stopped)

    def found(self) -> dict[str, Part]:
        return self._parts


def process_state(pid: int, word: str) -> str | None:
    """psutil's name of the state; None if it has ended, or the process id now belongs to another program."""
    try:
        process = psutil.Process(pid)
        state = str(process.status())
        return state if state != psutil.STATUS_ZOMBIE and word in process.cmdline() else None
    except psutil.Error:
        return None
