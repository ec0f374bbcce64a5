"""`fedfrozen site node|exec [KIT]`: a watchdog that starts the process, and restarts it if it hangs.

A hung process cannot be trusted to end itself, so its parent does: it reads the state that the process writes
into the meeting folder, and checks that it computes when it claims to. The watchdog is small, and
uses neither network nor data.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import fedfrozen_app
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.sign import Idleness, Sign, last_sign, processor_time

log = logging.getLogger(__name__)
LOOK = 1.0  # seconds between two checks
PAUSE = 5.0  # seconds before a process that ended by itself is restarted
START = 900.0  # seconds until a process writes its first state: it loads torch, maybe from a slow disk
STOOD_STILL = 10.0  # a longer pause between two checks means that this process was suspended
GRACE = 20.0  # seconds for it to end when asked to
BAD_INPUT = 2  # it ended with an error message, and would again
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# With these there is nothing to watch: help, its own limit of retries, or Flower's own way.
ALONE = ("--unguarded", "--help", "-h", "--max-retries", "--run-code-of-server")


def node(arguments: list[str]) -> None:
    """The verb `site node`."""
    _main("node", "supernode", arguments)


def executor(arguments: list[str]) -> None:
    """The verb `site exec`."""
    _main("exec", "executor", arguments)


def _main(word: str, name: str, arguments: list[str]) -> None:
    if any(option in arguments for option in ALONE):
        importlib.import_module(f"fedfrozen_app.sites.{name}").main(arguments)
        return
    kit = Path(next((word for word in arguments if not word.startswith("-")), "."))
    command = [sys.executable, "-P", "-m", "fedfrozen_app", "site", word, *arguments, "--unguarded"]
    sys.exit(keep(command, kit.expanduser() / "run", name))


def keep(command: Sequence[str], meeting: Path, name: str) -> int:
    """Keep this process running until it ends with an error message, or until a signal; its exit code."""
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    with _signals(pass_on):
        while True:
            child = subprocess.Popen(command, env=_environment(), preexec_fn=_end_with_parent)
            hung = _watch(child, meeting, name, asked)
            if asked:
                return _end(child, asked[0])
            if child.returncode == BAD_INPUT:
                return BAD_INPUT
            if hung is None:
                log.warning("The %s ended (exit code %s): starting it again.", name, child.returncode)
                _sleep(PAUSE, asked)
            else:
                log.warning("The %s hangs (%s): it was ended and is started again.", name, hung)
            if asked:
                return 128 + asked[0]


def _watch(child: subprocess.Popen, meeting: Path, name: str, asked: list[int]) -> str | None:
    """Wait until the child ends or a signal arrives: why it was killed; None if it ended by itself."""
    fresh = looked = time.monotonic()  # its time counts from here
    idleness = Idleness()
    while not asked:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK)
            return None
        now = time.monotonic()
        if now - looked > STOOD_STILL:  # we were suspended, and maybe it too
            fresh, idleness = now, Idleness()
        looked = now
        try:
            sign, used = last_sign(meeting, name), processor_time(child.pid)
        except (UserError, OSError):  # a damaged note, or it has just ended: see at the next check
            continue
        if sign is None or sign.pid != child.pid:  # of an earlier process
            sign = Sign(child.pid, "starting", fresh, fresh, fresh + START)
        state, hung = sign.state, None
        if (idle := idleness.look(state, used)) > (sign.idle or float("inf")):
            hung = f"{state}, and has not computed for {idle:.0f} s"
        if now > max(sign.until, fresh + sign.until - sign.seen):
            hung = f"{state}, and has said nothing for {now - sign.seen:.0f} s"
        if hung is not None:
            child.kill()
            child.wait()
            return hung
    return None


def _end(child: subprocess.Popen, number: int) -> int:
    """Pass the signal on and wait, then kill. The exit code, as a shell reports it."""
    if child.poll() is None:
        child.send_signal(number)
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _sleep(seconds: float, asked: list[int]) -> None:
    until = time.monotonic() + seconds
    while not asked and time.monotonic() < until:
        time.sleep(0.1)


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    handled = [
        number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN
    ]  # not those that nohup ignores
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _environment() -> dict[str, str]:
    """The child imports the same package, and nothing from the current folder."""
    root = str(Path(fedfrozen_app.__file__).parents[1])
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *others])}


def _end_with_parent() -> None:
    """Linux kills the child when the watchdog ends: a second child must not run at the same time."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
