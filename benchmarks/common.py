"""What every benchmark shares: interleaved repeats, median and range, ratios, and the result file.

A shared machine gets slower and faster by the minute, so no figure is compared with one of another run:
contestants take turns, and each repeat's ratio is taken between neighbours in time.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from provenance import known_commit, require_commit
from rich.console import Console
from rich.table import Table

from fedfrozen_app.report.summary import versions

RESULTS = Path(__file__).parent / "results"
CACHE = Path("~/.cache/fedfrozen-benchmarks").expanduser()
T = TypeVar("T")


# Statistics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A figure over its repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    def __format__(self, spec: str) -> str:
        """The format is that of each number: f"{spread:.2f}" gives "1.08 (1.05–1.13)"."""
        return f"{self.median:{spec}} ({self.low:{spec}}–{self.high:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def ratio(of: Sequence[float], to: Sequence[float]) -> Spread:
    """The ratios repeat by repeat: a slow minute of the machine is in both, and cancels."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


def interleave(
    contestants: Mapping[str, Callable[[], T]],
    repeats: int,
    on_turn: Callable[[int, str, T], None] = lambda number, name, value: None,
) -> dict[str, list[T]]:
    """Let all take a turn, `repeats` times; who begins changes every time, so that no place is favoured."""
    names = list(contestants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = contestants[name]()
            found[name].append(value)
            on_turn(number, name, value)
    return found


# Memory --------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """This process's resident set now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Let the kernel's high-water mark of the resident set begin anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The high-water mark since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def in_fresh_process(work: Callable[..., T], *arguments: Any) -> T:
    """Call it in a new interpreter: no earlier benchmark's memory, caches or threads are left in it."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# Models without a task -----------------------------------------------------------------------------------

SIDE = 768  # a base Transformer's attention matrix, 2.4 MB in float32


def blank_model(megabytes: float) -> dict[str, torch.Tensor]:
    """Arrays of a base Transformer's size that add up to so many MB (10**6 bytes) of float32."""
    left = round(megabytes * 1e6 / 4)
    arrays: dict[str, torch.Tensor] = {}
    while left:
        count = min(left, SIDE * SIDE)
        arrays[f"array{len(arrays)}"] = torch.zeros(count)
        left -= count
    return arrays


def size_of(arrays: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in arrays.values())


# Results -------------------------------------------------------------------------------------------------


def arguments(description: str, *, repeats: int = 5) -> argparse.ArgumentParser:
    require_commit()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"default {repeats}")
    return parser


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": round(memory / 1e9, 1),
        "load_average": os.getloadavg()[0],
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def about() -> dict[str, Any]:
    """What somebody needs to judge or repeat a figure."""
    script = Path(sys.argv[0])
    words = ["DIR" if Path(word).is_absolute() else word for word in sys.argv[1:]]  # of no use elsewhere
    return {
        "command": shlex.join(["python", f"benchmarks/{script.name}", *words]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": known_commit() or "unknown: no checkout, and no FEDFROZEN_COMMIT",
        "machine": machine(),
        "versions": versions(),
    }


def write_result(name: str, figures: Mapping[str, Any], path: Path | None = None) -> Path:
    """`results/NAME.json`, or `path`: the figures, and all that somebody needs to judge or repeat them."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": name} | about() | dict(figures)
    part = path.with_suffix(".part")  # whoever is killed here leaves the last whole file
    part.write_text(json.dumps(result, indent=2, default=asdict) + "\n")
    part.replace(path)
    return path


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    checks: Mapping[str, bool],
    path: Path,
) -> None:
    """The table, and whether each goal was met."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console = Console(width=max(110, Console().width))
    console.print(table)
    for name, met in checks.items():
        console.print(f"{'met   ' if met else 'MISSED'} {name.replace('_', ' ')}")
    console.print(f"Written to benchmarks/results/{path.name}")


def run_quietly(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder and return what it printed; its own message when it fails."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{shlex.join(command)}` failed:\n{done.stderr.strip()}")
    return done.stdout
