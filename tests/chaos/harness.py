"""Random faults on three real sites over TLS, and what must hold after each of them.

`python -m tests.chaos.harness --faults 60 --seed 1 --out chaos.jsonl` runs a whole series, a line for each
fault; given again with the same file it goes on where it ended, and `--table` prints what the file holds. The
test runs a short one. Processes that end are started again as the kits' units would; nobody mends anything
else by hand, but the command is given again (`resume`) where it has ended.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from fedfrozen_app.core import registry
from fedfrozen_app.files import lease, status
from fedfrozen_app.runtimes.flower.processes import free_port
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.sign import last_sign
from tests.chaos import clock
from tests.conftest import Run
from tests.sites.federation import (
    OPEN,
    ROOT,
    SITES,
    VIEWS,
    Deployment,
    federation,
    wait_for_port,
    wait_for_socket,
    write_data,
)
from tests.sites.twin import SAFL, words

ROUNDS = 8
A_RUN = 6  # faults, of which each takes a round or two
COMMON = ("runtime.min_nodes=3", "runtime.node_timeout=150", "runtime.round_timeout=200", "eval_every=4")
STATEFUL = "scaffold" if "scaffold" in registry.names("strategies") else "local"
METHODS = {
    "fedfrozen": (f"num_rounds={ROUNDS}", "strategy.warmup_rounds=2"),
    "safl": (*SAFL, f"num_rounds={ROUNDS}", "privacy.epsilon=3", "privacy.seeded_noise=false"),
    "stateful": (f"strategy={STATEFUL}", f"num_rounds={ROUNDS}"),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
SITE_PARTS = [f"{site}-{part}" for site in SITES for part in ("supernode", "executor")]
PARTS = ["command", "serverapp", "server-superlink", "server-superexec", *SITE_PARTS]


@dataclass
class Fault:
    kind: str  # a signal's name, "stop", "cut", "slow", "disk" or "clock"
    target: str
    method: str
    delay: float  # seconds after a round's row
    seconds: float = 0.0  # how long it lasts
    inner: bool = False  # of a site's part: the process itself, not its watchdog
    after_round: int = 0


@dataclass
class Outcome:
    fault: Fault
    run: int  # several faults hit one run: what holds at its end holds for all of them
    completed: bool = False
    same: bool = False  # the bits of the unbroken run; of a private one its epsilon
    trained_twice: list[str] = field(default_factory=list)
    mute: list[str] = field(default_factory=list)  # sites that were not in the run's last round
    failed_replies: list[str] = field(default_factory=list)
    resumed: int = 0  # how often the command had to be given again
    to_next_round: float | None = None  # seconds from the fault to the next row
    to_end: float | None = None  # seconds from the run's last fault to its end
    unbroken: float = 0.0  # seconds that the rounds after it take without a fault
    told: list[str] = field(default_factory=list)  # the last line of each command that failed

    @property
    def good(self) -> bool:
        return self.completed and self.same and not self.trained_twice and not self.mute


def draw(chance: random.Random, method: str, *, pause: float, clocks: bool, disks: bool) -> Fault:
    """One fault at a random moment of a random run."""
    kinds = [*SIGNALS, "stop", "cut", "slow"] + ["disk"] * disks + ["clock"] * clocks
    kind = chance.choice(kinds)
    if kind in ("cut", "slow"):
        target = chance.choice(SITES)
    elif kind == "disk":
        target = chance.choice(["command", *SITES])
    else:
        target = chance.choice(PARTS)
    lasts = {"stop": pause, "cut": chance.uniform(5, 30), "slow": 30.0, "disk": 15.0, "clock": 20.0}
    inner = target in SITE_PARTS and chance.random() < 0.5
    return Fault(kind, target, method, chance.uniform(0, 6), lasts.get(kind, 0.0), inner)


class Units:
    """Starts again what has ended, as `Restart=always` does."""

    def __init__(self, deployment: Deployment, library: Path | None) -> None:
        self.deployment, self.library = deployment, library
        self.steps = deployment.folder / "clocks"
        self.steps.mkdir()
        self.names: list[str] = []
        self.ended = threading.Event()
        self.restarts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self, name: str) -> None:
        clock.set_step(self.steps / name, 0)
        party, _, script = name.partition("-")
        with self.clock_of(name):
            self.deployment.start(party, script)

    @contextlib.contextmanager
    def clock_of(self, name: str) -> Iterator[None]:
        before = dict(os.environ)
        if self.library is not None:
            os.environ |= {"LD_PRELOAD": str(self.library), "CLOCK_STEP": str(self.steps / name)}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def keep(self, names: list[str]) -> None:
        self.names = names
        self._thread.start()

    def _watch(self) -> None:
        due: dict[str, float] = {}
        while not self.ended.wait(0.5):
            for name in self.names:
                if self.deployment.children._named(name).process.poll() is None:
                    continue
                if name not in due:
                    due[name] = time.monotonic() + (10 if name.endswith("supernode") else 3)
                elif time.monotonic() >= due[name]:
                    del due[name]
                    self.restarts[name] += 1
                    self.start(name)

    def end(self) -> None:
        self.ended.set()
        self._thread.join()


@dataclass
class Chaos:
    deployment: Deployment
    units: Units
    place: Path
    controls: dict[str, Path]
    disks: dict[str, Path]
    whole: dict[str, dict[str, Any]] = field(default_factory=dict)

    # What is compared -------------------------------------------------------------------------------

    def result(self, folder: Path) -> dict[str, torch.Tensor] | float:
        run = Run(folder)
        if run.rows[-1].get("epsilon_max") is not None:
            return round(run.rows[-1]["epsilon_max"], 9)  # private noise is never drawn twice
        found = {f"server/{name}": value for name, value in run.model.items()}
        run_id = run.summary["config"]["run_id"]
        for site in SITES:
            for kept in (self.deployment.kits / site / "var" / "state" / run_id).glob(
                f"*/{ROUNDS}/private.safetensors"
            ):
                found |= {f"{site}/{name}": value for name, value in load_file(kept).items()}
        return found

    def same(self, method: str, folder: Path) -> bool:
        one, other = self.whole[method]["result"], self.result(folder)
        if isinstance(one, float) or isinstance(other, float):
            return one == other
        return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)

    def trained_twice(self, run_id: str) -> list[str]:
        found = []
        for site in SITES:
            log = read_audit(Kit.read(self.deployment.kits / site).audit)
            counts = Counter(
                e["round"] for e in log if e["event"] == "sent" and e["run"] == run_id and not e["again"]
            )
            found += [
                f"{site} round {number}: {count} times" for number, count in counts.items() if count > 1
            ]
        return found

    # Running ----------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> subprocess.Popen:
        log = (self.place / "commands.log").open("a")
        with self.units.clock_of("command"):
            return subprocess.Popen(
                [sys.executable, "-m", "fedfrozen_app", *arguments],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def line(self, method: str, folder: Path, run_id: str) -> list[str]:
        return words(self.deployment, folder, *COMMON, *METHODS[method], f"run_id={run_id}")

    def unbroken(self, method: str) -> None:
        folder = self.place / f"whole-{method}"
        clock.set_step(self.units.steps / "command", 0)
        done = self.command(*self.line(method, folder, f"whole-{method}")).wait(900)
        assert done == 0, (method, self.last_line())
        rows = Run(folder).rows
        assert all(row["clients_failed"] == 0 for row in rows[1:])
        self.whole[method] = {
            "result": self.result(folder),
            "seconds": [row["seconds"]["total"] for row in rows],
        }

    def last_line(self) -> str:
        return (self.place / "commands.log").read_text().strip().splitlines()[-1]

    def trial(self, faults: Sequence[Fault], number: int, deadline: float = 1500) -> list[Outcome]:
        """A run with faults in a row, each once the one before has passed and another round is done."""
        run_id = f"trial-{os.getpid()}-{number}"
        folder = (self.disks.get("command") or self.place) / run_id
        run = Running(self, faults[0].method, folder, run_id, time.monotonic() + deadline)
        outcomes: list[Outcome] = []
        began: list[float] = []
        for fault in faults:
            run.until_rows(rows_of(folder) + 1)
            time.sleep(fault.delay)
            if run.ended():
                break
            fault.after_round = rows_of(folder) - 1
            outcome, resumed, told = Outcome(fault, number), run.resumed, len(run.told)
            began.append(time.monotonic())
            print(f"run {number}, after round {fault.after_round}: {fault}", flush=True)
            healer = threading.Thread(target=self.inject, args=(fault, run.process, folder))
            healer.start()
            if run.until_rows(fault.after_round + 2):
                outcome.to_next_round = time.monotonic() - began[-1]
            run.wait_for(healer)
            outcome.resumed, outcome.told = run.resumed - resumed, run.told[told:]
            outcomes.append(outcome)
        completed = run.until_end()
        found = Run(folder).rows if completed else []
        if completed:
            assert [row["round"] for row in found] == list(range(ROUNDS + 1)), run_id
        for outcome in outcomes:
            outcome.completed, outcome.trained_twice = completed, self.trained_twice(run_id)
            if completed:
                outcome.same = self.same(faults[0].method, folder)
                outcome.mute = sorted(set(SITES) - set(found[-1]["clients"]))
                outcome.failed_replies = [text for row in found for text in row.get("failures", ())]
        if outcomes:  # more commands may have been needed after the last fault
            outcomes[-1].resumed += run.resumed - sum(one.resumed for one in outcomes)
            outcomes[-1].to_end = time.monotonic() - began[-1]
            outcomes[-1].unbroken = sum(
                self.whole[faults[0].method]["seconds"][outcomes[-1].fault.after_round + 1 :]
            )
        return outcomes

    # Faults -----------------------------------------------------------------------------------------

    def pid(self, target: str, process: subprocess.Popen, folder: Path) -> int | None:
        if target == "command":
            return process.pid if process.poll() is None else None
        if target == "serverapp":
            owner = lease.holder(folder)
            return None if owner is None else owner.pid
        return self.deployment.children.pid(target)

    def inject(self, fault: Fault, process: subprocess.Popen, folder: Path) -> None:
        """Break it, and where a fault passes by itself, wait and take it away."""
        if fault.kind in ("cut", "slow"):
            control = self.controls[fault.target]
            control.write_text(json.dumps({"cut": True} if fault.kind == "cut" else {"rate": 30_000}))
            time.sleep(fault.seconds)
            control.write_text("{}")
            return
        if fault.kind == "disk":
            with filled(self.disks[fault.target]):
                time.sleep(fault.seconds)
            return
        if fault.kind == "clock":
            # What Flower has started has the clock of the process it came from.
            name = "server-superexec" if fault.target == "serverapp" else fault.target
            clock.set_step(self.units.steps / name, 3600)
            time.sleep(fault.seconds)
            clock.set_step(self.units.steps / name, 0)
            return
        pid = self.pid(fault.target, process, folder)
        if fault.inner and pid is not None:
            site, _, part = fault.target.partition("-")
            sign = last_sign(self.deployment.kits / site / "run", part)
            pid = None if sign is None else sign.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if fault.kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(fault.seconds)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, SIGNALS[fault.kind])

    def mute(self) -> list[str]:
        """Which sites do not answer a run that begins now."""
        folder = self.place / f"probe-{time.monotonic_ns()}"
        line = self.line("fedfrozen", folder, f"probe-{time.monotonic_ns()}")
        process = self.command(*line, "num_rounds=1", "strategy.warmup_rounds=1", "runtime.min_nodes=1")
        process.wait(900)
        if process.returncode:
            return list(SITES)
        return sorted(set(SITES) - set(Run(folder).rows[-1]["clients"]))


class Running:
    """A run, and the person who gives the command again where it has ended before its time."""

    def __init__(self, chaos: Chaos, method: str, folder: Path, run_id: str, limit: float) -> None:
        self.chaos, self.folder, self.limit = chaos, folder, limit
        self.line = chaos.line(method, folder, run_id)
        self.process = chaos.command(*self.line)
        self.resumed = 0
        self.told: list[str] = []  # the last line of each command that failed

    def ended(self) -> bool:
        return rows_of(self.folder) > ROUNDS or time.monotonic() > self.limit

    def until_rows(self, count: int) -> bool:
        while rows_of(self.folder) < count and not self._is_over():
            time.sleep(0.05)
        return rows_of(self.folder) >= count

    def wait_for(self, healer: threading.Thread) -> None:
        while healer.is_alive() and not self._is_over():
            time.sleep(0.05)
        healer.join()

    def until_end(self) -> bool:
        """Whether it is complete."""
        while not self._is_over():
            time.sleep(0.1)
        if self.process.poll() is None:
            self.process.kill()
        return self._complete()

    def _complete(self) -> bool:
        found = status.read(self.folder)
        return found is not None and found.state == "complete"

    def _is_over(self) -> bool:
        """Gives the command again where it has ended and the run has not."""
        code = self.process.poll()
        if code is None:
            return time.monotonic() > self.limit
        if code == 0 or self._complete():  # the latter while it was asked to resume
            return True
        if time.monotonic() > self.limit:
            return True
        self.told.append(f"{code}: {self.chaos.last_line()}")
        self.resumed += 1
        time.sleep(2)
        again = ["resume", str(self.folder), "--stop"]
        if not list((self.folder / "checkpoints").glob("[0-9]*")):  # it was hit before its first round
            again = [*self.line, "overwrite=true"]
        self.process = self.chaos.command(*again)
        return False


def rows_of(folder: Path) -> int:
    try:
        return len((folder / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not a byte is free meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 65536)
            file.flush()
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def small_disks(place: Path, sizes: dict[str, str]) -> Iterator[dict[str, Path]]:
    """A file system each; none where mounting is not permitted."""
    mounted: dict[str, Path] = {}
    try:
        for name, size in sizes.items():
            folder = place / f"disk-{name}"
            folder.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
            if subprocess.run(mount, capture_output=True).returncode:
                break
            mounted[name] = folder
        yield mounted if len(mounted) == len(sizes) else {}
    finally:
        for folder in mounted.values():
            subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def standing(place: Path) -> Iterator[Chaos]:
    """Three sites, each behind a relay of its own, with units that start again what ends."""
    library = clock.build(place)
    sizes = {"command": "200m", **dict.fromkeys(SITES, "100m")}
    with small_disks(place, sizes) as disks, federation(place / "fed", SITES) as deployment:
        write_data(deployment.folder / "data", deployment.kits, SITES, rows=240)
        units = Units(deployment, library)
        controls = {}
        for site in SITES:
            port, controls[site] = free_port(), place / f"link-{site}.json"
            relay = [sys.executable, "-m", "tests.chaos.relay", str(port), str(deployment.port)]
            os.environ["PYTHONPATH"] = str(ROOT)
            deployment.children.start(f"relay-{site}", [*relay, str(controls[site])], place / "relay_home")
            wait_for_port(port)
            limits = {"transfer": 90, "idle": 90, "training": 600}
            address = f"127.0.0.1:{port}"
            deployment.change(site, "site.yaml", views=VIEWS, superlink=address, limits=limits)
            much = dict.fromkeys(("rounds_per_day", "hellos_per_day", "refusals_per_day"), 100_000)
            allowed = {"strategies": ["fedfrozen", "safl", STATEFUL], "max_epsilon": 1e6, "max_delta": 0.5}
            deployment.change(site, "policy.yaml", **OPEN | much | allowed)
            if disks:
                (deployment.kits / site / "var").symlink_to(disks[site])
        for name in ("server-superlink", "server-superexec"):  # again, with clocks of their own
            deployment.kill(name)
        names = ["server-superlink", "server-superexec", *SITE_PARTS]
        for name in names:
            units.start(name)
            if name == "server-superlink":
                wait_for_socket(deployment.kits / "server" / "run" / "superlink.sock")
        for site in SITES:
            deployment.wait_for_line(f"{site}-supernode", "SuperNode ID")
        clock.set_step(units.steps / "command", 0)
        units.keep(names)
        try:
            yield Chaos(deployment, units, place, controls, disks)
        finally:
            units.end()


def series(
    place: Path, faults: int, seed: int, out: Path, *, pause: float = 60.0, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Faults one after another on one federation, until `out` holds so many: a line each.

    `only` names kinds and methods to draw from: without any, all.
    """
    found = read(out)
    with standing(place) as chaos:
        options = {"pause": pause, "clocks": chaos.units.library is not None, "disks": bool(chaos.disks)}
        while len(found) < faults:
            number = found[-1]["run"] + 1 if found else 0
            chance = random.Random(f"{seed}-{number}")
            methods = [method for method in METHODS if method in only] or list(METHODS)
            method = methods[number % len(methods)]
            drawn = [draw(chance, method, **options) for _ in range(200)]
            drawn = [one for one in drawn if one.kind in only or not set(only) - set(METHODS)][:A_RUN]
            if method not in chaos.whole:
                chaos.unbroken(method)
            for outcome in chaos.trial(drawn, number):
                found.append(asdict(outcome) | {"good": outcome.good, "seed": seed})
                with out.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
                print(json.dumps(found[-1]), flush=True)
        mute = chaos.mute()
        print(f"mute: {mute or 'nobody'}; started again: {dict(chaos.units.restarts)}", flush=True)
        assert not mute, mute
    return found


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(found: list[dict[str, Any]]) -> str:
    """Seconds from a fault to the next finished round, less those that a round takes, by what was done."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        kinds.setdefault(one["fault"]["kind"], []).append(one)
    lines = ["| fault | how many | all as unbroken | given again | s to the next round | s to the end |"]
    lines.append("|---|---|---|---|---|---|")
    for kind, ones in kinds.items():
        good, again = sum(one["good"] for one in ones), sum(one["resumed"] > 0 for one in ones)
        spans = [_span([one[key] for one in ones]) for key in ("to_next_round", "to_end")]
        lines.append(f"| {kind} | {len(ones)} | {good} | {again} | {spans[0]} | {spans[1]} |")
    return "\n".join(lines)


def _span(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{median(known):.0f} ({known[0]:.0f}–{known[-1]:.0f})" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=60.0, help="seconds that a process stands still")
    parser.add_argument("--only", nargs="+", default=[], help="these kinds and methods; default: all")
    parser.add_argument("--out", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what --out holds, and end")
    given = parser.parse_args()
    if given.table:
        print(table(read(given.out)))
        return
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    found = series(place, given.faults, given.seed, given.out, pause=given.pause, only=given.only)
    print(table(found))
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
