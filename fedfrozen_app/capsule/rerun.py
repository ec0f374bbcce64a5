"""Rerun cells of a capsule, each in its own folder, and compare the results."""

import hashlib
import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.capsule.claims import without_times
from fedfrozen_app.capsule.opened import Capsule
from fedfrozen_app.capsule.splits import difference, split_digests
from fedfrozen_app.config import ComposedConfig, quoted
from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.files.readers import read_arrays, read_object
from fedfrozen_app.files.rows import metric_name, read_rows
from fedfrozen_app.launch import execute
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.stored_config import stored_config

SAME, INSIDE, OUTSIDE, NOT_RUN = "same bits", "inside the interval", "outside", "not run"
HOLDS = (SAME, INSIDE)


@dataclass(frozen=True)
class Verdict:
    cell: str
    result: str  # SAME | INSIDE | OUTSIDE | NOT_RUN
    stated: float | None = None
    found: float | None = None
    interval: dict[str, Any] | None = None
    why: str = ""

    @property
    def sentence(self) -> str:
        if self.result == NOT_RUN:
            return f"{self.cell}: not run, because {self.why}"
        words = f"{self.cell}: {self.result}, {self.found:.4f} (stated {self.stated:.4f}"
        if self.result != SAME and self.interval:
            low, high, by = (self.interval[key] for key in ("low", "high", "by"))
            words += f", interval {low:.4f} to {high:.4f} by {by}"
        return f"{words})"


def sampled(capsule: Capsule, count: int | None) -> list[str]:
    """All cells, or `count` of them, drawn by the capsule's digest so that no one can choose them."""
    cells = sorted(capsule.cells)
    if count is None or count >= len(cells):
        return cells
    draw = {cell: hashlib.sha256(f"{capsule.digest}/{cell}".encode()).hexdigest() for cell in cells}
    return sorted(sorted(cells, key=draw.__getitem__)[:count])


def configured(
    capsule: Capsule, cell: str, places: dict[str, Path], folder: Path, trusted: bool
) -> ComposedConfig:
    """The cell's configuration as plain values, with this machine's data paths."""
    summary = read_object(capsule.run(cell) / "summary.json") or {}
    words, had = shlex.split(str(summary["command"]))[1:], dict(summary["config"])
    extra = [quoted("output_dir", str(folder)), "overwrite=false"]
    for section, values in had.items():
        keys = {section: values} if isinstance(values, str) else values if isinstance(values, dict) else {}
        for key, value in keys.items():
            if isinstance(value, str) and value in places:
                name = section if isinstance(values, str) else f"{section}.{key}"
                extra.append(quoted(name, str(places[value])))
    found = stored_config(capsule.run(cell), words, had, extra, trusted=trusted, trains=True)
    return found.with_absolute_paths()


def run_cell(capsule: Capsule, cell: str, places: dict[str, Path], folder: Path, *, trusted: bool) -> Verdict:
    composed = configured(capsule, cell, places, folder, trusted)
    if composed.config.runtime.name == "deployed":
        raise UserError(f"The cell {cell} ran over real sites: nobody else can run it again.")
    if (other := difference(capsule.cells[cell]["splits"], split_digests(composed.config))) != "":
        return Verdict(cell, NOT_RUN, why=f"{other} are not those of the capsule")
    known = status.read(folder)
    done = known is not None and known.state == "complete"
    if not (done and known is not None and known.digest == status.digest_of(composed.resolved)):
        shutil.rmtree(folder, ignore_errors=True)
        check_free(folder, overwrite=False)
        try:
            with status.recorded(folder, composed.resolved, composed.overrides):
                execute(Job(composed, folder))
        except (UserError, RunFailed) as error:
            return Verdict(cell, NOT_RUN, why=str(error))
    return compare(capsule, cell, folder)


def compare(capsule: Capsule, cell: str, folder: Path) -> Verdict:
    rows, again = read_rows(capsule.run(cell)), read_rows(folder)
    key = f"final_test_{metric_name(rows)}"
    stated = (read_object(capsule.run(cell) / "summary.json") or {})[key]
    found = (read_object(folder / "summary.json") or {}).get(key)
    groups = capsule.record["claims"]["groups"]
    interval = next(group["again"] for group in groups if cell in group["cells"])
    model = hash_of(digests(read_arrays(folder / "model.safetensors")[0]))
    plain = json.loads(json.dumps(without_times(again)))
    if model == capsule.cells[cell]["model"] and plain == without_times(rows):
        return Verdict(cell, SAME, stated, found, interval)
    inside = interval is not None and found is not None and interval["low"] <= found <= interval["high"]
    return Verdict(cell, INSIDE if inside else OUTSIDE, stated, found, interval)
