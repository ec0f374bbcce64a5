"""Commands that are shown before they run, so that the user can repeat them."""

import io
import os
import shlex
import signal
import subprocess
import textwrap
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path
from typing import Self

from fedfrozen_app.commands import dispatch
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.runtimes.flower.processes import ANSI_COLOUR, flower_environment

WIDTH = 100
BAD_INPUT = 2
GRACE = 3.0  # seconds for a process to end when asked to


def say(text: str = "") -> None:
    print(text, flush=True)


def explain(text: str) -> None:
    # Paths are not wrapped, so that they can be copied.
    say(textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False))


def heading(text: str) -> None:
    say(f"\n== {text}")


def show_line(line: str) -> None:
    say(f"    {ANSI_COLOUR.sub('', line)}".rstrip())


class Shell:
    """Runs commands in the trial's folder, with this environment's `fedfrozen`; the `with` block ends
    them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            if process.poll() is None:
                end(process, GRACE)

    def start(self, line: str, log: Path, *, shown: bool = True) -> subprocess.Popen[bytes]:
        """Show the command and start it; Ctrl-C does not reach it."""
        if shown:
            say(f"\n$ {line}")
        with log.open("wb") as out:
            process = subprocess.Popen(
                shlex.split(line),
                cwd=self.folder,
                env=flower_environment(self.folder / "flwr"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._started.append(process)
        return process

    def run(self, line: str) -> None:
        """Show a command, carry it out and show its output; `RunFailed` if it fails.

        Our own commands run in this process, which has already done the slow imports.
        """
        say(f"\n$ {line}")
        words = shlex.split(line)
        code = self._own(words[1:]) if words[0] == "fedfrozen" else self._other(words)
        if code:
            raise RunFailed(f"`{line}` ended with exit code {code}: see above.")

    def _own(self, words: list[str]) -> int:
        printed = io.StringIO()
        try:
            with chdir(self.folder), redirect_stdout(printed):
                return dispatch(words)
        except UserError as error:
            printed.write(f"fedfrozen: {error}")
            return BAD_INPUT
        finally:
            for text in printed.getvalue().splitlines():
                show_line(text)

    def _other(self, words: list[str]) -> int:
        done = subprocess.run(
            words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        for text in done.stdout.splitlines():
            show_line(text)
        return done.returncode


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask a process to end, and after `patience` seconds kill it and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Tail:
    """Shows the new lines of a growing log file, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def show(self, *, all_of_it: bool = False) -> None:
        content = self._path.read_bytes()[self._seen :]
        if not all_of_it:  # the last line may not be whole
            content = content[: content.rfind(b"\n") + 1]
        self._seen += len(content)
        for line in content.decode(errors="replace").splitlines():
            show_line(line)
