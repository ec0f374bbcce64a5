"""The figures that sum a run up, as `summary.json` keeps them."""

import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "fedfrozen",
    "flwr",
    "torch",
    "transformers",
    "datasets",
    "flwr-datasets",
    "ray",
    "hydra-core",
)
LAST = 10  # rounds that "stability" looks back over
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
) -> dict[str, Any]:
    metric = "f1" if any("test_f1" in row for row in rows) else "accuracy"
    key = f"test_{metric}"
    judged = [row for row in rows if key in row]
    summary: dict[str, Any] = {"status": status, "rounds": rows[-1]["round"] if rows else 0}
    if judged:
        best = max(judged, key=lambda row: row[key])
        last = [row[key] for row in judged if row["round"] > 0][-LAST:]
        summary |= {
            f"final_{key}": judged[-1][key],
            "final_test_loss": judged[-1]["test_loss"],
            f"best_{key}": best[key],
            "best_test_round": best["round"],
            "stability": {
                "std_last_10": statistics.stdev(last) if len(last) > 1 else None,
                "best_minus_final": best[key] - judged[-1][key],
            },
        }
    chosen = next((row for row in judged if row["round"] == selected_round), None)
    if chosen is not None:
        summary |= {"selected_round": selected_round, f"selected_{key}": chosen[key]}
    return summary | {
        "total_bytes_up": sum(row.get("bytes_up", 0) for row in rows),
        "total_bytes_down": sum(row.get("bytes_down", 0) for row in rows),
        "clients_failed": sum(row.get("clients_failed", 0) for row in rows),
        "seconds": seconds,
        "seed": config["seed"],
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}, {platform.processor() or 'unknown processor'}",
        "versions": versions(),
        "git_commit": git_commit(),
        "command": command,
        "config": config,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # inside a Flower bundle our own package is not installed
            found[name] = "not installed"
    return found


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
