"""Finished runs, read from their folders, and the figures of each."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.compare.grouping import key_of
from fedfrozen_app.compare.model import Row, Run
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.rows import metric_name, number, read_rows

COMPLETE = ("completed", "stopped early")


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[tuple[Path, str]]]:
    kept: dict[tuple[str, int], Run] = {}
    left_out: list[tuple[Path, str]] = []
    for folder in run_folders(folders):
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            state, seed = summary["status"], int(summary["config"]["seed"])
        except FileNotFoundError:
            left_out.append((folder, _reason(folder) or "not finished: it has no summary.json"))
            continue
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            left_out.append((folder, f"its summary.json cannot be read ({type(error).__name__})"))
            continue
        if state not in COMPLETE:
            left_out.append((folder, _reason(folder) or str(state)))
            continue
        run = Run(folder, seed, summary, read_rows(folder), {})
        if math.isnan(figures(summary, run.rows, metric_name(run.rows), None).get("final", math.nan)):
            left_out.append((folder, "it was never evaluated on a test set, or diverged to NaN"))
            continue
        key = (key_of(summary), seed)
        if key in kept:
            # Counting one seed twice would make every test too sure of itself.
            left_out.append((folder, f"the same settings and seed as {kept[key].folder}"))
            continue
        kept[key] = run
    return sorted(kept.values(), key=lambda run: run.seed), left_out


def _reason(folder: Path) -> str:
    try:
        return str(json.loads((folder / "status.json").read_text(encoding="utf-8"))["reason"] or "")
    except (OSError, json.JSONDecodeError, KeyError):
        return ""


def figures(
    summary: Mapping[str, Any], rows: Sequence[Row], metric: str, target: float | None
) -> dict[str, float]:
    """One run's figures, by the keys of FIGURES; those that it lacks are absent."""
    stability = summary.get("stability") or {}
    found: dict[str, Any] = {
        "final": summary.get(f"final_test_{metric}"),
        "selected": summary.get(f"selected_test_{metric}"),
        "best": summary.get(f"best_test_{metric}"),
        "std_last_10": stability.get("std_last_10"),
        "best_minus_final": stability.get("best_minus_final"),
        "worst_client": worst_client(rows),
        "bytes_up": summary.get("total_bytes_up"),
        "bytes_down": summary.get("total_bytes_down"),
        "seconds": summary.get("seconds"),
    }
    if target is not None:
        found["rounds_to_target"], found["bytes_to_target"] = reached(rows, metric, target)
    return {key: float(value) for key, value in found.items() if not math.isnan(number(value))}


def worst_client(rows: Sequence[Row]) -> float | None:
    """The lowest accuracy of a client on its own held-out rows, each as of its latest round."""
    latest: dict[str, float] = {}
    for row in rows:
        latest |= (row.get("by_client") or {}).get("client_val_after") or {}
    return min(latest.values(), default=None)


def reached(rows: Sequence[Row], metric: str, target: float) -> tuple[int | None, int | None]:
    """The first round at which the test figure is `target` or more, and the bytes sent by its end."""
    sent = 0
    for row in rows:
        sent += (row.get("bytes_up") or 0) + (row.get("bytes_down") or 0)
        if number(row.get(f"test_{metric}")) >= target:
            return row["round"], sent
    return None, None
