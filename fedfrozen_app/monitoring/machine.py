"""Disk, memory and GPUs of this machine, and when certificates expire."""

import datetime
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedfrozen_app.core.certificates import read_certificate
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.monitoring.families import Collected

COARSE = 10_000_000  # bytes: hides what a few rows take of disk or memory
ASK = ("index", "memory.used", "memory.total", "utilization.gpu")
PAUSE = 15.0  # seconds between two calls of nvidia-smi, which is slow
PATIENCE = 5.0  # seconds for its answer
MB = 1024 * 1024


@dataclass
class Machine:
    folders: Mapping[str, Path]  # whose disks are monitored, by label
    certificates: Mapping[str, Path]  # by party
    _gpus: list[tuple[str, float, float, float]] = field(default_factory=list)
    _asked: float | None = None

    def collect(self, found: Collected) -> None:
        for name, folder in self.folders.items():
            try:
                disk = shutil.disk_usage(folder)
            except OSError:  # not created yet, or removed: other metrics show that
                continue
            found.add("fedfrozen_disk_free_bytes", coarse(disk.free), folder=name)
            found.add("fedfrozen_disk_size_bytes", coarse(disk.total), folder=name)
        memory = psutil.virtual_memory()
        found.add("fedfrozen_memory_available_bytes", coarse(memory.available))
        found.add("fedfrozen_memory_size_bytes", coarse(memory.total))
        for gpu, used, size, busy in self._look_at_gpus():
            found.add("fedfrozen_gpu_memory_used_bytes", coarse(used), gpu=gpu)
            found.add("fedfrozen_gpu_memory_size_bytes", coarse(size), gpu=gpu)
            found.add("fedfrozen_gpu_busy_ratio", busy, gpu=gpu)
        for party, path in self.certificates.items():
            found.add("fedfrozen_certificate_seconds", seconds_left(path), holder=party)

    def _look_at_gpus(self) -> list[tuple[str, float, float, float]]:
        now = time.monotonic()
        if self._asked is None or now - self._asked >= PAUSE:
            self._asked, self._gpus = now, gpus()
        return self._gpus


def coarse(size: float) -> float:
    """Rounded down, but nearly full stays distinguishable from full."""
    return float(size // COARSE * COARSE)


def gpus() -> list[tuple[str, float, float, float]]:
    """(index, bytes used, bytes in all, share of time busy) of each NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(ASK)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        rows = [line.split(",") for line in answer.stdout.splitlines()]
        return [(r[0].strip(), float(r[1]) * MB, float(r[2]) * MB, float(r[3]) / 100) for r in rows]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # no driver, or "[N/A]"
        return []


def seconds_left(path: Path) -> float | None:
    """Seconds until a certificate expires; None if it is missing or unreadable."""
    try:
        end = read_certificate(path).not_valid_after_utc
    except (UserError, OSError):
        return None
    return (end - datetime.datetime.now(datetime.UTC)).total_seconds()
