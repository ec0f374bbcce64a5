"""Twelve faults over three real sites: which alert a real Prometheus raises, when, and when it clears.

`python -m tests.chaos.twelve_alerts --out twelve_alerts.jsonl [--only NAME...]` breaks one thing after the
other, most of them within a run that goes on, and prints a table. What is broken is mended as the alert's own
`do` says.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cryptography import x509

from fedfrozen_app.core.certificates import PEM
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.sign import last_sign
from tests.chaos import clock, panels
from tests.chaos.alerting import Prometheus, until, watched
from tests.chaos.harness import COMMON, METHODS, Chaos, filled, read, rows_of, standing
from tests.sites.federation import ROOT, SITES
from tests.sites.twin import words

SITE, SPOILER = SITES[0], SITES[1]
SOON, CLEARED = 60.0, 150.0  # seconds for an alert to fire, and to clear after the repair
DAYS = 5  # that the certificate near its end is good for
SPOILT = """\
import dataclasses, pathlib, sys, threading, time

def watch():
    name = "fedfrozen_app.sites.handle_train"
    while not hasattr(sys.modules.get(name), "TRANSITIONS"):
        time.sleep(0.05)
    module = sys.modules[name]
    before = module.train_reply

    def train_reply(message, reply, **more):
        if (pathlib.Path.cwd() / "spoilt").exists() and reply.arrays:
            arrays = {key: value * float("nan") for key, value in reply.arrays.items()}
            reply = dataclasses.replace(reply, arrays=arrays)
        return before(message, reply, **more)

    module.train_reply = train_reply

if "exec" in sys.orig_argv and "--unguarded" in sys.orig_argv:
    threading.Thread(target=watch, daemon=True).start()
"""


@dataclass
class Story:
    fault: str
    alert: str
    fired: float | None = None  # seconds after the fault
    cleared: float | None = None  # seconds after the repair
    beside: list[str] = field(default_factory=list)  # other alerts that fired meanwhile
    problem: str = ""  # why it could not be told

    @property
    def good(self) -> bool:
        return self.fired is not None and self.fired <= SOON and self.cleared is not None


@dataclass
class Scene:
    chaos: Chaos
    folder: Path  # of the run that goes on
    process: subprocess.Popen | None = None

    @property
    def deployment(self):
        return self.chaos.deployment

    def kit(self, site: str = SITE) -> Path:
        return self.deployment.kits / site

    def line(self, name: str, *more: str) -> list[str]:
        return words(self.deployment, self.chaos.place / name, *COMMON, *more, f"run_id={name}")

    def keep_training(self) -> None:
        """A run that goes on, and is resumed where it has ended."""
        if self.process is not None and self.process.poll() is None:
            return
        line = self.line(self.folder.name, *METHODS["fedfrozen"], "num_rounds=5000", "checkpoint.every=20")
        again = ["resume", str(self.folder), "--stop"]
        self.process = self.chaos.command(
            *(again if list(self.folder.glob("checkpoints/[0-9]*")) else [*line, "overwrite=true"])
        )
        before = rows_of(self.folder)
        until(lambda: rows_of(self.folder) > before + 1, 300)

    def stop_training(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(120)
            self.process.kill()

    def start_run(self, name: str, *more: str) -> subprocess.Popen:
        return self.chaos.command(
            *self.line(name, *METHODS["fedfrozen"], "num_rounds=2", "strategy.warmup_rounds=1", *more)
        )

    @contextlib.contextmanager
    def kept_down(self, *names: str) -> Iterator[None]:
        """Killed, and not started again before the block ends."""
        units = self.chaos.units
        units.names = [name for name in units.names if name not in names]
        for name in names:
            self.deployment.kill(name)
        try:
            yield
        finally:
            for name in names:
                units.start(name)
            units.names = [*units.names, *names]


Fault = Callable[[Scene], contextlib.AbstractContextManager[None]]  # within the block it is broken


def killed(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return scene.kept_down(f"{SITE}-executor", f"{SITE}-supernode")


def mute(scene: Scene) -> contextlib.AbstractContextManager[None]:
    """Connected, and without an executor that would answer."""
    return scene.kept_down(f"{SITE}-executor")


def server_killed(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return scene.kept_down("server-superlink")


def disk_full(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return filled(scene.chaos.disks[SITE])


@contextlib.contextmanager
def clock_wrong(scene: Scene) -> Iterator[None]:
    step = scene.chaos.units.steps / f"{SITE}-supernode"
    clock.set_step(step, 120)
    try:
        yield
    finally:
        clock.set_step(step, 0)


@contextlib.contextmanager
def link_slow(scene: Scene) -> Iterator[None]:
    scene.chaos.controls[SITE].write_text(json.dumps({"rate": 30_000}))
    try:
        yield
    finally:
        scene.chaos.controls[SITE].write_text("{}")


@contextlib.contextmanager
def executor_hung(scene: Scene) -> Iterator[None]:
    sign = last_sign(scene.kit() / "run", "executor")
    assert sign is not None
    os.kill(sign.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # its watchdog may have ended it
            os.kill(sign.pid, signal.SIGCONT)


@contextlib.contextmanager
def bad_reply(scene: Scene) -> Iterator[None]:
    spoilt = scene.kit(SPOILER) / "spoilt"
    spoilt.touch()
    try:
        yield
    finally:
        spoilt.unlink()


@contextlib.contextmanager
def certificate_ends(scene: Scene) -> Iterator[None]:
    path = scene.kit() / "node.crt"
    before = path.read_bytes()
    known = x509.load_pem_x509_certificate(before)
    authority = Authority.read(scene.deployment.kits / "authority", Passphrase())
    path.write_bytes(authority.issue(known.public_key(), SITE, "site", DAYS).public_bytes(PEM))
    try:
        yield
    finally:
        path.write_bytes(before)


@contextlib.contextmanager
def approval_missing(scene: Scene) -> Iterator[None]:
    """A person at the site has yet to decide; approved, the run goes to its end."""
    scene.deployment.change(SITE, "policy.yaml", approval="ask")
    run = scene.start_run("asked", "runtime.approval_timeout=600")
    waiting = Approvals(scene.kit() / "var" / "approvals")
    until(lambda: bool(waiting.waiting()), 300)
    try:
        yield
    finally:
        hash_ = waiting.waiting()[0].hash
        subprocess.run(["fedfrozen", "site", "approve", hash_, str(scene.kit())], check=True)
        assert run.wait(300) == 0, scene.chaos.last_line()
        scene.deployment.change(SITE, "policy.yaml", approval="policy")


@contextlib.contextmanager
def version_refused(scene: Scene) -> Iterator[None]:
    from fedfrozen_app.sites.policy import Policy

    bundles = list(Policy.read(scene.kit() / "policy.yaml").bundles)
    scene.deployment.change(SITE, "policy.yaml", bundles=["0" * 64])
    audit = scene.kit() / "var" / "audit.jsonl"
    before = audit.read_text().count('"refused"')
    run = scene.start_run("refused")
    until(lambda: audit.read_text().count('"refused"') > before, 300)
    try:
        yield
    finally:
        scene.deployment.change(SITE, "policy.yaml", bundles=bundles)
        assert run.wait(300) == 0, scene.chaos.last_line()


@contextlib.contextmanager
def budget_exhausted(scene: Scene) -> Iterator[None]:
    """A private run takes all that the policy gives."""
    scene.deployment.change(SITE, "policy.yaml", max_epsilon=3.0)
    spent = scene.kit() / "var" / "state" / "budget.json"
    private = (*METHODS["safl"], "num_rounds=1", "privacy.epsilon=3")
    run = scene.chaos.command(*scene.line("private", *private))
    until(spent.exists, 300)
    try:
        yield
    finally:
        scene.deployment.change(SITE, "policy.yaml", max_epsilon=100.0)
        assert run.wait(300) == 0, scene.chaos.last_line()


# name: (the fault, its alert, whether a run goes on meanwhile)
FAULTS: dict[str, tuple[Fault, str, bool]] = {
    "site mute": (mute, f"FedfrozenSiteMute{{{SITE}}}", True),
    "link slow": (link_slow, f"FedfrozenLinkSlow{{{SITE}}}", True),
    "bad reply": (bad_reply, "FedfrozenBadReply{server}", True),
    "site killed": (killed, f"FedfrozenSiteSilent{{{SITE}}}", True),
    "server killed": (server_killed, "FedfrozenServerDown{server}", True),
    "clock wrong": (clock_wrong, f"FedfrozenClockWrong{{{SITE}}}", True),
    "disk full": (disk_full, f"FedfrozenDiskFull{{{SITE}}}", True),
    "executor hung": (executor_hung, f"FedfrozenExecutorHung{{{SITE}}}", True),
    "certificate near its end": (certificate_ends, f"FedfrozenCertificateEnds{{{SITE}}}", True),
    "version refused": (version_refused, f"FedfrozenVersionRefused{{{SITE}}}", False),
    "approval missing": (approval_missing, f"FedfrozenApprovalMissing{{{SITE}}}", False),
    "budget exhausted": (budget_exhausted, f"FedfrozenBudgetExhausted{{{SITE}}}", False),
}


def tell(scene: Scene, prometheus: Prometheus, name: str) -> Story:
    fault, alert, training = FAULTS[name]
    story = Story(name, alert)
    if training:
        scene.keep_training()
    else:
        scene.stop_training()
    until(lambda: alert not in prometheus.firing(), CLEARED)
    known = prometheus.firing()
    with fault(scene):
        story.fired = prometheus.wait_for(alert, firing=True, patience=SOON + 15)
        story.beside = sorted(prometheus.firing() - known - {alert})
    story.cleared = prometheus.wait_for(alert, firing=False, patience=CLEARED)
    return story


@contextlib.contextmanager
def scene_in(place: Path) -> Iterator[tuple[Scene, Prometheus]]:
    (place / "python").mkdir()
    (place / "python" / "sitecustomize.py").write_text(SPOILT)
    with standing(place) as chaos:
        for site in SITES:
            chaos.deployment.change(site, "policy.yaml", monitoring="activity")
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{place / 'python'}"
        scene = Scene(chaos, place / "going")
        with scene.kept_down(f"{SPOILER}-executor"):
            pass  # it comes back as one that can be made to spoil its replies
        with watched(chaos.deployment, SITES) as prometheus:
            try:
                yield scene, prometheus
            finally:
                scene.stop_training()


def table(stories: list[dict]) -> str:
    lines = ["| fault | alert | fires after | clears after | beside it |", "|---|---|---|---|---|"]
    for one in stories:
        spans = ["never" if one[key] is None else f"{one[key]:.0f} s" for key in ("fired", "cleared")]
        lines.append(
            f"| {one['fault']} | {one['alert']} | {spans[0]} | {spans[1]} | {', '.join(one['beside'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("twelve_alerts.jsonl"))
    parser.add_argument("--only", nargs="+", default=list(FAULTS))
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="alerts-"))
    with scene_in(place) as (scene, prometheus):
        begun = time.time()
        for name in given.only:
            began = time.monotonic()
            try:
                story = tell(scene, prometheus, name)
            except (
                AssertionError,
                OSError,
                subprocess.SubprocessError,
            ) as error:  # the next ones can be told
                story = Story(name, FAULTS[name][1], problem=f"{type(error).__name__}: {error}")
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(story)) + "\n")
            print(f"{time.monotonic() - began:.0f} s: {story}", flush=True)
        given.out.with_suffix(".panels.json").write_text(json.dumps(panels.ask(prometheus, begun)))
    print(table(read(given.out)))
    if not all(Story(**one).good for one in read(given.out)):
        sys.exit(f"Not all of them as they should be: see {place}.")
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
