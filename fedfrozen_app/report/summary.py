"""The metrics that summarise a run in `summary.json`."""

import platform
import shlex
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedfrozen_app.core import own_objects, registry
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.readers import Damaged, read_object
from fedfrozen_app.files.rows import HEADLINES, cold_bytes_down, metric_name
from fedfrozen_app.report.selection import selection_changes

PACKAGES = (
    "fedfrozen",
    "flwr",
    "torch",
    "transformers",
    "datasets",
    "ray",
    "hydra-core",
)
# The type of each value of the file, if present.
OBJECTS = ("config", "versions", "stability", "personal", "epsilon", "baseline")
NUMBERS = (
    *("rounds", "total_bytes_up", "total_bytes_down", "total_bytes_down_cold", "seconds", "virtual_seconds"),
    *(f"final_test_{name}" for name in HEADLINES),
)
LAST = 10  # rounds that "stability" covers
Row = dict[str, Any]


def summarise(
    rows: Sequence[Row],
    *,
    config: dict[str, Any],
    status: str,
    seconds: float,
    device: str,
    command: str,
    selected_round: int | None,
    personal: dict[str, Any] | None = None,
    trivial: Mapping[str, float] | None = None,
    baseline: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Summarise a run. `trivial`: test scores of predictors that ignore their input, such as
    `majority_accuracy`. `baseline`: test scores of a linear model."""
    evaluated: dict[str, Any] = {} if personal is None else {"personal": personal}
    evaluated |= trivial or {}
    if objects := own_objects.used_by(config):
        evaluated["objects"] = own_objects.notes(objects)
    if baseline is not None:
        evaluated["baseline"] = baseline
    return {"status": status, **_metrics(rows, selected_round, config), **evaluated} | {
        "seconds": seconds,
        "seed": config["seed"],
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}, {platform.processor() or 'unknown processor'}",
        "versions": versions(),
        "git_commit": git_commit(),
        "command": command,
        "config": config,
    }


def stored_summary(run_dir: Path) -> dict[str, Any] | None:
    """summary.json as the run wrote it; None if it wrote none. Raises `Damaged`."""
    path = run_dir / "summary.json"
    found = read_object(path)
    if found is None:
        return None
    for keys, kind in ((OBJECTS, dict), (NUMBERS, (int, float))):
        for key in keys:
            if found.get(key) is not None and not isinstance(found[key], kind):
                raise Damaged(path, f"its {key} is not what a run writes")
    if "objects" in found and not _are_objects(found["objects"]):
        raise Damaged(path, "its objects are not what a run writes")
    return found


def _are_objects(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("name", "word", "digest"))
        for one in found
    )


def finished_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of a run that has just ended in another process."""
    found = stored_summary(run_dir)
    if found is None:
        raise RunFailed(f"The run ended without a summary: see the log in {run_dir}.")
    return found


def read_summary(run_dir: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The run's summary.json; if there is none for these rows yet, a summary of rows and checkpoint."""
    done = rows[-1]["round"] if rows else 0
    stored = stored_summary(run_dir)
    # A resumed or restarted run still has its old summary.
    if stored is not None and stored.get("rounds", done) == done:
        return stored
    state = checkpoint.newest_state(run_dir)
    summary = {
        "status": _run_state(run_dir),
        **_metrics(rows, state["hooks"]["best"]["round"] if state else None, state and state["config"]),
        "seconds": sum(row.get("seconds", {}).get("total", 0.0) for row in rows),
    }
    if state:
        summary |= {
            "seed": state["config"]["seed"],
            "command": shlex.join(["fedfrozen", *state["overrides"]]),
            "config": state["config"],
        }
    return summary


def _run_state(run_dir: Path) -> str:
    """The state of a run without a summary: from its status.json, or else when it last wrote a row."""
    known = status.read(run_dir)
    if known is not None and known.state in ("failed", "interrupted"):
        return ": ".join(word for word in (known.state, known.reason) if word)
    if not (run_dir / "metrics.jsonl").is_file():
        return "not begun"
    written = datetime.fromtimestamp((run_dir / "metrics.jsonl").stat().st_mtime)
    return f"not finished, last written {written:%Y-%m-%d %H:%M:%S}"


def _metrics(
    rows: Sequence[Row], selected_round: int | None, config: dict[str, Any] | None
) -> dict[str, Any]:
    metric = metric_name(rows)
    key = f"test_{metric}"
    evaluated = [row for row in rows if key in row]
    summary: dict[str, Any] = {"rounds": rows[-1]["round"] if rows else 0}
    if evaluated:
        best = max(evaluated, key=lambda row: row[key])
        last = [row[key] for row in evaluated if row["round"] > 0][-LAST:]
        summary |= {
            f"final_{key}": evaluated[-1][key],
            "final_test_loss": evaluated[-1].get("test_loss"),
            **_lowest(evaluated),
            f"best_{key}": best[key],
            "best_test_round": best["round"],
            "stability": {
                "std_last_10": statistics.stdev(last) if len(last) > 1 else None,
                "best_minus_final": best[key] - evaluated[-1][key],
            },
        }
    chosen = next((row for row in evaluated if row["round"] == selected_round), None)
    if chosen is not None:
        summary |= {"selected_round": selected_round, f"selected_{key}": chosen[key]}
    if (changes := selection_changes(rows)) is not None:
        summary["selection_changes"] = changes
    spent = {client: value for row in rows for client, value in row.get("epsilon", {}).items()}
    if spent:
        delta = max(row["delta"] for row in rows if "delta" in row)
        summary |= {"epsilon": spent, "delta": delta}  # what each client has spent
    if spent and config:
        privacy = config["privacy"]
        summary |= {"privacy_unit": privacy["unit"], "private": not privacy["seeded_noise"]}
    if marks := [row["audited"] for row in rows if "audited" in row]:
        summary["audited"] = marks[-1]
    if (method := method_of(config)) is not None:
        summary |= method.sums_up(rows)
    if any("virtual_seconds" in row for row in rows):
        summary["virtual_seconds"] = max(row.get("virtual_seconds", 0.0) for row in rows)
    if any("bytes_down_cold" in row for row in rows):
        summary["total_bytes_down_cold"] = sum(map(cold_bytes_down, rows))
    return summary | {
        "total_bytes_up": sum(row.get("bytes_up", 0) for row in rows),
        "total_bytes_down": sum(row.get("bytes_down", 0) for row in rows),
        "clients_failed": sum(row.get("clients_failed", 0) for row in rows),
    }


def _lowest(evaluated: Sequence[Row]) -> dict[str, float]:
    """The last and the lowest test value of metrics that are better when smaller."""
    summary: dict[str, float] = {}
    for name in ("perplexity", "mae"):
        if found := [row[f"test_{name}"] for row in evaluated if f"test_{name}" in row]:
            summary |= {f"final_test_{name}": found[-1], f"best_test_{name}": min(found)}
    return summary


def method_of(config: dict[str, Any] | None) -> Any:
    """The class of a run's strategy; None if unknown or not installed."""
    name = ((config or {}).get("strategy") or {}).get("name")
    try:
        return None if name is None else registry.find("strategies", str(name))
    except UserError:  # the run used a package that is not installed here
        return None


@cache  # constant within a process, and queried for every run of a sweep
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # in a Flower bundle fedfrozen is not installed
            found[name] = "not installed"
    return found


@cache
def git_commit() -> str | None:
    """The commit of the checkout this code runs from; None for an installed package or a bundle."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
