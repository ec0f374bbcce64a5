"""A real Slurm of one node, as long as a test needs it: munged, slurmctld and slurmd of Debian's packages.

Two partitions over the same cores: a job in `high` preempts those in `low`, which Slurm then runs again.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sites.federation import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
GRACE = 3  # seconds from a job's SIGTERM to its SIGKILL
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={grace}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime={grace} State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF State=UP
"""


@dataclass
class Slurm:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        """By job that is not over: its state and why it waits."""
        lines = self.call("squeue", "-h", "-r", "-p", "low", "-o", "%i %t %r").splitlines()
        return {line.split()[0]: line.partition(" ")[2] for line in lines}

    def preempt(self, cores: int) -> None:
        """Jobs that take these cores for a moment."""
        self.call("sbatch", "-p", "high", "-n", str(cores), "-o", "/dev/null", "--wrap", "sleep 1")

    def hurry(self) -> None:
        """Slurm begins a job again two minutes after it was preempted: now instead."""
        for job, state in self.states().items():
            if "BeginTime" in state:
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def one_node_slurm(folder: Path, cpus: int = 2) -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if found(name) is None]:
        pytest.skip(f"{missing[0]} is not installed (Debian: slurm-wlm, munge)")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {"host": socket.gethostname().partition(".")[0], "ports": (free_port(), free_port())}
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    text = CONFIG.format(folder=folder, user=user, cpus=cpus, grace=GRACE, **names)
    (folder / "slurm.conf").write_text(text)
    slurm = Slurm(folder)
    munge = {
        "socket": "munge.socket",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
        "seed-file": "munge.seed",
    }
    words = ["--force", "--foreground", f"--key-file={key}"]
    words += [f"--{option}={folder / name}" for option, name in munge.items()]
    with ExitStack() as stack:
        stack.callback(until_ended, folder)
        for command in (["munged", *words], ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            program = found(command[0])
            with (folder / f"{command[0]}.out").open("wb") as out:
                child = subprocess.Popen(
                    [str(program), *command[1:]], env=slurm.environment, stdout=out, stderr=subprocess.STDOUT
                )
            stack.callback(child.wait, 30)
            stack.callback(child.terminate)
            time.sleep(1)
        until_idle(slurm)
        stack.callback(slurm.call, "scancel", "-u", user)
        yield slurm


def found(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def until_idle(slurm: Slurm) -> None:
    for _ in range(60):
        if " idle " in slurm.call("sinfo", "-h", "-o", "x %t x"):
            return
        time.sleep(0.5)
    raise AssertionError((slurm.folder / "slurmctld.log").read_text()[-2000:])


def until_ended(folder: Path) -> None:
    """The socket's lock is munged's alone: nothing of it is left."""
    for name in ("munge.socket", "munge.socket.lock"):
        (folder / name).unlink(missing_ok=True)
