"""Finished runs, read from their folders, and the metrics of each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.readers import Damaged
from fedfrozen_app.files.rows import cold_bytes_down, is_long, metric_name, number, read_rows
from fedfrozen_app.report.baseline_tables import read_baselines, values_of
from fedfrozen_app.report.compare.grouping import key_of
from fedfrozen_app.report.compare.model import Row, Run
from fedfrozen_app.report.summary import stored_summary

STOPPED_EARLY = "stopped early"
COMPLETE = ("completed", STOPPED_EARLY)


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[tuple[Path, str]]]:
    """The finished runs, and the reasons for leaving out others: one damaged file stops no comparison."""
    kept: dict[tuple[str, int], Run] = {}
    left_out: list[tuple[Path, str]] = []
    for folder in run_folders(folders):
        run = _read_run(folder)
        if isinstance(run, str):
            left_out.append((folder, run))
            continue
        key = (key_of(run.summary), run.seed)
        if key in kept:
            # Counting one seed twice would make every test overconfident.
            left_out.append((folder, f"the same settings and seed as {kept[key].folder}"))
            continue
        kept[key] = run
    return sorted(kept.values(), key=lambda run: run.seed), left_out


def _read_run(folder: Path) -> Run | str:
    """A finished run, or why it is left out."""
    try:
        summary = stored_summary(folder)
        if summary is None:
            return _reason(folder) or "not finished: it has no summary.json"
        state, seed = summary["status"], int(summary["config"]["seed"])
        if state not in COMPLETE:
            return _reason(folder) or str(state)
        rows = read_rows(folder)
        entries = read_baselines(folder, summary.get("rounds"))
        run = Run(folder, seed, summary, rows, {}, baselines=values_of(entries, metric_name(rows)))
    except Damaged as error:
        return f"its {error.path.name} {error.what}"
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"its summary.json cannot be read ({type(error).__name__})"
    if not run.rows and summary.get("rounds"):
        return "its metrics.jsonl is empty"
    if math.isnan(metrics_of(summary, run.rows, metric_name(run.rows)).get("final", math.nan)):
        return "it was never evaluated on a test set, or diverged to NaN"
    return run


def _reason(folder: Path) -> str:
    known = status.read(folder)
    return known.reason if known is not None else ""


def metrics_of(summary: Mapping[str, Any], rows: Sequence[Row], metric: str) -> dict[str, float]:
    """One run's metrics, by the keys of METRICS; missing ones are absent."""
    stability = summary.get("stability") or {} if is_long(rows, metric) else {}
    found: dict[str, Any] = {
        "final": summary.get(f"final_test_{metric}"),
        "selected": summary.get(f"selected_test_{metric}"),
        "best": summary.get(f"best_test_{metric}"),
        "std_last_10": stability.get("std_last_10"),
        "best_minus_final": stability.get("best_minus_final"),
        "worst_client": worst_client(rows),
        "bytes_up": summary.get("total_bytes_up"),
        "bytes_down": summary.get("total_bytes_down_cold", summary.get("total_bytes_down")),
        "seconds": summary.get("seconds"),
        "virtual_seconds": summary.get("virtual_seconds"),
    }
    return {key: float(value) for key, value in found.items() if not math.isnan(number(value))}


def worst_client(rows: Sequence[Row]) -> float | None:
    """The lowest accuracy of any client on its own held-out rows, each from its latest round."""
    latest: dict[str, float] = {}
    for row in rows:
        latest |= (row.get("by_client") or {}).get("client_val_after") or {}
    return min(latest.values(), default=None)


def with_target(run: Run, metric: str, target: float, horizon: int) -> Run:
    """The run with its rounds, bytes and virtual time to the target. A run that does not reach the target
    counts with the whole horizon and the bytes sent until then: leaving it out would favour lucky runs."""
    last, reached, sent, virtual = horizon, False, 0, 0.0
    for row in run.rows:
        if row["round"] > horizon:
            break
        sent += (row.get("bytes_up") or 0) + cold_bytes_down(row)
        virtual = row.get("virtual_seconds", virtual)
        if number(row.get(f"test_{metric}")) >= target:
            last, reached = row["round"], True
            break
    metrics = run.metrics | {"rounds_to_target": float(last), "bytes_to_target": float(sent)}
    if "virtual_seconds" in run.metrics:
        metrics["virtual_to_target"] = virtual
    return replace(run, metrics=metrics, reached=reached)


def horizon_of(runs: Iterable[Run]) -> int:
    """The last round that every run could have trained: for one that stopped early, all that it was
    allowed."""
    last: list[int] = []
    for run in runs:
        done = max((int(row["round"]) for row in run.rows), default=0)
        allowed = (run.summary.get("config") or {}).get("num_rounds")
        stopped = run.summary.get("status") == STOPPED_EARLY
        last.append(max(done, allowed) if stopped and isinstance(allowed, int) else done)
    return min(last, default=0)
