"""Handle Ctrl-C, a scheduler's SIGTERM and a closed terminal's SIGHUP alike, and delay them if needed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_signals() -> None:
    """Let all three signals act like Ctrl-C. A signal that is ignored (nohup, `&`) stays ignored."""
    if threading.current_thread() is threading.main_thread():  # handlers can be set only there
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignore signals at the end of a process: one during shutdown would change the exit code."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def shielded() -> Iterator[None]:
    """Delay signals: one that arrives inside the block interrupts right after it."""
    if threading.current_thread() is not threading.main_thread():  # signals never reach others
        yield
        return
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    caught = [n for n, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in caught:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
    if came:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
