"""The state that a process of a site writes into its meeting folder, and how to detect that it hangs.

The watchdog imports this, so nothing heavy is imported here. All times are of the machine's monotonic clock,
which all processes share and which is never set.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfrozen_app.core.errors import UserError

SIGN_OF_LIFE = 2.0  # seconds between two identical notes
SHARE = 0.02  # of a processor: a process that uses less does not compute (a heartbeat needs far less)


@dataclass(frozen=True)
class Sign:
    """The last state that a process wrote, and when: one that hangs writes no more."""

    pid: int
    # Of an executor: waiting | alone (no SuperNode answers it) | pulling | working | without room | pushing
    state: str
    since: float
    seen: float
    until: float  # by then it has written again, or it hangs
    idle: float | None = None  # in this state it computes: idle for longer, it hangs
    answer: str = ""  # to the last question that it has read


class Note:
    """Writes NAME.json in the meeting folder, from the thread that works: it is the one that can hang."""

    def __init__(self, meeting: Path, name: str) -> None:
        self._path = meeting / f"{name}.json"
        self._question = meeting / f"{name}.question"
        self._last = Sign(os.getpid(), "", 0.0, 0.0, 0.0)
        self._lock = threading.Lock()  # pieces of a message travel in several threads

    @property
    def last(self) -> Sign:
        return self._last

    @property
    def state(self) -> str:
        return self._last.state

    def write(self, state: str, limit: float, *, idle: float | None = None, now: bool = False) -> None:
        """Write the current state, and within how many seconds the next note follows."""
        with self._lock:
            moment, last = time.monotonic(), self._last
            answer = _read_text(self._question)
            pause = min(SIGN_OF_LIFE, limit / 4)
            if not now and (state, answer) == (last.state, last.answer) and moment - last.seen < pause:
                return
            since = last.since if state == last.state else moment
            self._last = Sign(os.getpid(), state, since, moment, moment + limit, idle, answer)
            part = self._path.with_suffix(".part")
            try:
                part.write_text(json.dumps(asdict(self._last)))
                part.replace(self._path)
            except OSError:  # a full disk: readers see that the note grows old
                part.unlink(missing_ok=True)

    def again(self) -> None:
        """The same state again, with a new time."""
        last = self._last
        self.write(last.state, last.until - last.seen, idle=last.idle)


def last_sign(meeting: Path, name: str) -> Sign | None:
    """The last note of this process; None if none has run yet."""
    path = meeting / f"{name}.json"
    try:
        return Sign(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it.") from error


def ask(meeting: Path, name: str, patience: float) -> float | None:
    """Ask the loop of a process for an answer: the seconds until it arrives; None if there is none."""
    question = f"{os.getpid()}-{time.monotonic_ns()}"
    path = meeting / f"{name}.question"
    began = time.monotonic()
    path.write_text(question)
    try:
        while (took := time.monotonic() - began) < patience:
            sign = last_sign(meeting, name)
            if sign is not None and sign.answer == question:
                return took
            time.sleep(0.02)
        return None
    finally:
        path.unlink(missing_ok=True)


class Idleness:
    """How long a process has been idle, from samples of its processor time."""

    def __init__(self) -> None:
        self._mark: tuple[float, float] | None = None  # when it last computed, and what it had used by then
        self._state = ""

    def look(self, state: str, used: float) -> float:
        """Add a sample of its processor time; returns for how many seconds it has been idle in this state."""
        moment = time.monotonic()
        if self._mark is None or state != self._state:
            self._mark, self._state = (moment, used), state
        if used - self._mark[1] > SHARE * (moment - self._mark[0]):
            self._mark = moment, used
        return moment - self._mark[0]


def processor_time(pid: int) -> float:
    """Processor seconds of all threads of a process; OSError if it has ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
