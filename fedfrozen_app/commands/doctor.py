"""`fedfrozen doctor [OVERRIDES]`: whether this machine can do the run, and what to change if not."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from fedfrozen_app.config import Config, compose_run
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.report.console import human_bytes
from fedfrozen_app.report.summary import versions

LITTLE_DISK = 2e9  # bytes
SIGNS = {"good": "[green]ok[/]", "doubt": "[yellow]look[/]", "bad": "[red]bad[/]"}


@dataclass(frozen=True)
class Finding:
    about: str
    verdict: str  # a key of SIGNS
    text: str


class Unfit(UserError):
    """Something that a run needs is missing here."""


def doctor(arguments: list[str]) -> None:
    found = list(examine(arguments))
    table = Table(show_header=False)
    for column in ("about", "verdict", "text"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(Text(one.about), SIGNS[one.verdict], Text(one.text))
    Console().print(table)
    bad = [one.about for one in found if one.verdict == "bad"]
    if bad:
        raise Unfit(f"A run would fail here: see {', '.join(bad)} in the table above.")


def examine(overrides: list[str]) -> Iterator[Finding]:
    yield Finding("Python", "good", sys.executable)
    yield from packages()
    yield gpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = counted(torch.get_num_threads(), "thread")
    yield Finding("CPU", "good", f"{counted(cores, 'core')}, torch uses {threads}")
    yield Finding("Settings", "good", str(conf_dir()))
    yield writable("Flower's folder", get_flwr_home())
    yield writable("Results", Path("outputs").resolve())
    yield from paths(overrides)


def packages() -> Iterator[Finding]:
    """Versions of important packages, and requirements of this package that are not met."""
    for name, have in versions().items():
        missing = have == "not installed" and name != "fedfrozen"
        yield Finding(name, "bad" if missing else "good", have)
    try:
        needed = [Requirement(line) for line in requires("fedfrozen") or []]
    except PackageNotFoundError:
        yield Finding(
            "Needs", "doubt", "fedfrozen runs from a folder, not installed: its needs are not checked"
        )
        return
    extras = metadata("fedfrozen").get_all("Provides-Extra") or []
    for need in needed:
        for extra in ["", *extras]:
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                if problem := unmet(need, extra):
                    yield Finding(need.name, "doubt" if extra else "bad", problem)
                break


def unmet(need: Requirement, extra: str) -> str:
    """Why a requirement is not met; empty if it is."""
    install = f'pip install "fedfrozen[{extra}]"' if extra else f'pip install "{need}"'
    try:
        have = version(need.name)
    except PackageNotFoundError:
        return f"not installed: {install}"
    return "" if need.specifier.contains(have, prereleases=True) else f"{have} is installed: {install}"


def gpu() -> Finding:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        memory = human_bytes(torch.cuda.get_device_properties(0).total_memory)
        return Finding("GPU", "good", f"{torch.cuda.device_count()} x {name}, {memory}: device=auto uses it")
    built = torch.version.cuda or "without CUDA"
    return Finding("GPU", "doubt", f"torch {torch.__version__} (built {built}) sees none: runs use the CPU")


def writable(about: str, folder: Path) -> Finding:
    """Whether a folder, which may not exist yet, is writable, and how much space is left."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}, {human_bytes(free)} free"
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding(about, "bad", f"{folder} cannot be written")
    return Finding(about, "good" if free > LITTLE_DISK else "doubt", text)


def paths(overrides: list[str]) -> Iterator[Finding]:
    """The data and the model that these overrides name."""
    try:
        config = compose_run(overrides).config
    except UserError as error:
        yield Finding("Overrides", "bad", str(error))
        return
    yield Finding("Data", "good", _named(config, "dataset"))
    yield Finding("Model", "good", _named(config, "model"))


def _named(config: Config, group: str) -> str:
    part = config.dataset if group == "dataset" else config.model
    return part.name if part.path is None else f"{part.name}: {Path(part.path).expanduser()}"
