"""`fedfrozen site node|exec [KIT]`: a watchdog that starts the process itself, and again where it hangs.

A hung process cannot be trusted to end itself, so its parent does: it reads what the process says of itself
in the meeting folder, and looks whether it computes where it says that it does. It is small, and touches
neither network nor data.
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
from fedfrozen_app.errors import UserError
from fedfrozen_app.sites.sign import Idleness, Sign, last_sign, processor_time

log = logging.getLogger(__name__)
LOOK = 1.0  # seconds between two looks
PAUSE = 5.0  # seconds before one that ended by itself is started again
START = 900.0  # seconds until a process says its first word: it reads torch, maybe from a slow disk
STOOD_STILL = 10.0  # seconds between two looks that only a stopped process has
GRACE = 20.0  # seconds for it to end when it is asked to
BAD_INPUT = 2  # it ended with a sentence, and would again
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# With these there is nothing to watch: it explains itself, gives up by itself, or is Flower's own way.
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
    """Keep this process running until it ends with a sentence, or we are told to end; its exit code."""
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
    """Until it has ended, or we are asked to end: why it was ended, None where it ended by itself."""
    fresh = looked = time.monotonic()  # from when on its time counts
    idleness = Idleness()
    while not asked:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK)
            return None
        now = time.monotonic()
        if now - looked > STOOD_STILL:  # we did, and maybe it with us
            fresh, idleness = now, Idleness()
        looked = now
        try:
            sign, used = last_sign(meeting, name), processor_time(child.pid)
        except (UserError, OSError):  # a damaged note, or it has just ended: the next look tells
            continue
        if sign is None or sign.pid != child.pid:  # of one before
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
    """Pass the signal on, and wait; one that does not end is ended. Its exit code, as a shell says it."""
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
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's, not
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _environment() -> dict[str, str]:
    """The child reads the same package, wherever it came from, and nothing from the folder it stands in."""
    root = str(Path(fedfrozen_app.__file__).parents[1])
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *others])}


def _end_with_parent() -> None:
    """Linux ends the child with us, however we end: two of them would be worse than none."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
