"""Ten faults over three real sites: what the operator reads, when, and how each run ends.

`python -m tests.chaos.ten_faults --out ten_faults.jsonl [--only NAME...]` breaks one run after the other on
one federation, and prints a table. Processes of servers and sites that end are started again as the kits'
units would; where the command ends, it is given again (`resume` or `attach`).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.files import lease, status
from fedfrozen_app.sites.sign import last_sign
from tests.chaos.harness import COMMON, METHODS, ROUNDS, Chaos, filled, read, rows_of, standing
from tests.conftest import Run
from tests.sites.federation import ROOT, SITES
from tests.sites.twin import words

SITE = SITES[0]
AFTER = 3  # rows: the fault comes within the round after
STOPPED, FULL = 60.0, 25.0  # seconds
LIMIT = 600.0
ROUTINE = re.compile(
    r"^round \d+/|^\S+: \d+ train and|^Handed in|^Ctrl-C stops|^Results go|^Sites with|^A round sends|^ |^/"
)


@dataclass
class Story:
    """One fault."""

    fault: str
    read: list[tuple[float, str]] = field(default_factory=list)  # seconds after the fault, line
    commands: list[str] = field(default_factory=list)  # what had to be given again
    next_round: float | None = None  # seconds from the fault to the next finished round
    completed: bool = False
    same_bits: bool = False
    failed_replies: int = 0


class NotBegun(Exception):
    """The run ended before the fault: its console's lines."""


class Console:
    """The operator's terminal: the command, and each line with its moment."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedfrozen_app", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, timeout: float) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code


Inject = Callable[[Chaos, Console, Path], None]


def kill_supernode(chaos: Chaos, console: Console, folder: Path) -> None:
    chaos.deployment.kill(f"{SITE}-supernode")


def kill_executor(chaos: Chaos, console: Console, folder: Path) -> None:
    chaos.deployment.kill(f"{SITE}-executor")


def kill_server_app(chaos: Chaos, console: Console, folder: Path) -> None:
    owner = lease.holder(folder)
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)


def kill_superlink(chaos: Chaos, console: Console, folder: Path) -> None:
    chaos.deployment.kill("server-superlink")


def kill_site(chaos: Chaos, console: Console, folder: Path) -> None:
    kill_executor(chaos, console, folder)
    kill_supernode(chaos, console, folder)


def stop_site(chaos: Chaos, console: Console, folder: Path) -> None:
    """Its machine sleeps: nothing of it runs for a minute."""
    signs = [last_sign(chaos.deployment.kits / SITE / "run", part) for part in ("supernode", "executor")]
    groups = [chaos.deployment.children.pid(f"{SITE}-{part}") for part in ("supernode", "executor")]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for group in groups:
            os.killpg(group, number)
        for sign in signs:
            if sign is not None:
                os.kill(sign.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED)


def close_terminal(chaos: Chaos, console: Console, folder: Path) -> None:
    console.process.send_signal(signal.SIGHUP)


def close_laptop(chaos: Chaos, console: Console, folder: Path) -> None:
    console.process.kill()


def fill_site(chaos: Chaos, console: Console, folder: Path) -> None:
    with filled(chaos.disks[SITE]):
        time.sleep(FULL)


def fill_server(chaos: Chaos, console: Console, folder: Path) -> None:
    with filled(chaos.disks["command"]):
        console.process.wait(LIMIT)


FAULTS: dict[str, Inject] = {
    "SuperNode killed": kill_supernode,
    "executor killed": kill_executor,
    "server app killed": kill_server_app,
    "SuperLink killed": kill_superlink,
    "whole site killed": kill_site,
    "site stopped for a minute": stop_site,
    "terminal closed": close_terminal,
    "operator's laptop closed": close_laptop,
    "site's disk full": fill_site,
    "server's disk full": fill_server,
}


def again(folder: Path, fault: str) -> list[str]:
    """What the operator types next."""
    return ["attach", str(folder)] if fault == "operator's laptop closed" else ["resume", str(folder)]


def tell(chaos: Chaos, fault: str, number: int) -> Story:
    """One run with this fault."""
    run_id = f"ten-{os.getpid()}-{number}"
    folder = (chaos.disks.get("command") or chaos.place) / run_id
    story, deadline = Story(fault), time.monotonic() + LIMIT
    line = words(chaos.deployment, folder, *COMMON, *METHODS["fedfrozen"], f"run_id={run_id}")
    consoles = [Console(*line)]
    while rows_of(folder) < AFTER:
        if consoles[0].process.poll() is not None or time.monotonic() > deadline:
            raise NotBegun("\n".join(text for _, text in consoles[0].lines))
        time.sleep(0.02)
    began, before = time.monotonic(), rows_of(folder)
    injecting = threading.Thread(target=FAULTS[fault], args=(chaos, consoles[0], folder))
    injecting.start()
    while time.monotonic() < deadline:
        if story.next_round is None and rows_of(folder) > before:
            story.next_round = time.monotonic() - began
        if consoles[-1].process.poll() is not None:
            known = status.read(folder)
            if known is not None and known.state == "complete":
                break
            injecting.join()
            consoles[-1].wait(5)
            story.commands.append(again(folder, fault)[0])
            consoles.append(Console(*again(folder, fault)))
        time.sleep(0.05)
    injecting.join()
    for console in consoles:
        story.read += [(round(at - began, 1), text) for at, text in console.lines if at >= began]
        if console.process.poll() is None:
            console.process.kill()
    story.read = [(at, text) for at, text in story.read if is_news(text)]
    story.completed = [row["round"] for row in Run(folder).rows] == list(range(ROUNDS + 1))
    story.same_bits = story.completed and chaos.same("fedfrozen", folder)
    story.failed_replies = sum(row.get("clients_failed", 0) for row in Run(folder).rows)
    return story


def is_news(line: str) -> bool:
    """Not what every run prints, and no line of its last table."""
    boxed = any("\u2500" <= letter <= "\u257f" for letter in line)
    return bool(line.strip()) and not boxed and not ROUTINE.search(line)


def table(stories: list[dict[str, Any]]) -> str:
    lines = ["| fault | first line, seconds after it | given again | next round after | ends as unbroken |"]
    lines.append("|---|---|---|---|---|")
    for one in stories:
        read = one["read"]
        first = f"{read[0][0]:.0f} s: {read[0][1][:140]}" if read else "nothing"
        after = "" if one["next_round"] is None else f"{one['next_round']:.0f} s"
        good = "yes" if one["completed"] and one["same_bits"] else "NO"
        lines.append(f"| {one['fault']} | {first} | {', '.join(one['commands'])} | {after} | {good} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("ten_faults.jsonl"))
    parser.add_argument("--only", nargs="+", default=list(FAULTS))
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    with standing(place) as chaos:
        chaos.unbroken("fedfrozen")
        for number, fault in enumerate(given.only):
            try:
                story = tell(chaos, fault, number)
            except NotBegun as error:
                print(f"{fault}: the run did not come as far as the fault:\n{error}", flush=True)
                continue
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(story)) + "\n")
            print(f"{fault}: {'as unbroken' if story.same_bits else 'NOT as unbroken'}", flush=True)
    print(table(read(given.out)))
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
