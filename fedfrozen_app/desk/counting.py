"""Count a proposal's people and bytes in a separate process, once per proposal.

Counting reads the site's data and builds the model that a server proposed, which may take long or exhaust
memory; the page must not. The process runs `fedfrozen site show HASH --count --json`.
"""

import json
import os
import resource
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from fedfrozen_app.sites.survey import Survey

PATIENCE = 300.0  # seconds
WAIT = 1.0  # seconds for which a page waits for a count


@dataclass
class Count:
    """A count; `problem`: why there is none."""

    done: threading.Event = field(default_factory=threading.Event)
    survey: Survey | None = None
    problem: str = ""


@dataclass
class Counts:
    """Counts by the proposal's hash; one process at a time."""

    kit: Path
    _found: dict[str, Count] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _child: subprocess.Popen[str] | None = None
    _closed: bool = False

    def of(self, proposal: str) -> Count:
        """Start to count if necessary, and wait briefly for the result."""
        with self._lock:
            fresh = proposal not in self._found
            count = self._found.setdefault(proposal, Count())
        if fresh:
            threading.Thread(target=self._count, args=(proposal, count), daemon=True).start()
        count.done.wait(WAIT)
        return count

    def _count(self, proposal: str, count: Count) -> None:
        try:
            with self._turn:
                code, out, err = self._run(["site", "show", proposal, str(self.kit), "--count", "--json"])
            if code == 0:
                count.survey = Survey(**json.loads(out.splitlines()[-1]))
            else:
                count.problem = (err.strip().splitlines() or [f"exit code {code}"])[-1]
        except subprocess.TimeoutExpired:
            count.problem = f"it took more than {PATIENCE:.0f} s"
        except (OSError, ValueError, TypeError, IndexError) as error:
            count.problem = f"the count cannot be read ({error})"
        finally:
            count.done.set()

    def _run(self, words: list[str]) -> tuple[int, str, str]:
        if self._closed:
            return -1, "", "the page was closed"
        command = [sys.executable, "-P", "-m", "fedfrozen_app", *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        ) as child:
            self._child = child
            resource.prlimit(child.pid, resource.RLIMIT_DATA, (half_of_memory(), half_of_memory()))
            try:
                out, err = child.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
            return child.returncode, out, err

    def close(self) -> None:
        """Stop processes that still count."""
        self._closed = True
        if self._child is not None and self._child.poll() is None:
            self._child.kill()


def half_of_memory() -> int:
    """The memory limit of a count: a server may propose a model of any size, and the executor needs memory
    too."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
