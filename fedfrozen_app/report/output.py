"""Writes a run's output files when it ends."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfrozen_app.files import checkpoint, folder_manifest
from fedfrozen_app.files.disk import replace_file, replace_tensors
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.report.console import headline
from fedfrozen_app.report.curves import write_curves
from fedfrozen_app.report.data_section import brief, read_data
from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.report.selection import chose, write_selection
from fedfrozen_app.report.summary import summarise


def write_outputs(
    folder: Path,
    model: Mapping[str, Tensor],
    rows: Sequence[dict[str, Any]],
    metadata: dict[str, str] | None = None,
    **details: Any,
) -> dict[str, Any]:
    """`model.safetensors`, `summary.json`, `curves.png` and `report.html`; returns the summary."""
    if model:  # a run that failed before its first round has none
        replace_tensors(model, folder / "model.safetensors", metadata)
    summary = summarise(rows, **details)
    if (data := read_data(folder)) is not None:
        summary["data"] = brief(data)
    replace_file(folder / "summary.json", json.dumps(summary, indent=2))
    write_curves(rows, folder / "curves.png", title=headline(summary))
    if chose(rows):
        write_selection(rows, folder / "selection.png")
    write_report(folder)
    folder_manifest.note_end(folder)
    return summary


def write_interrupted(
    folder: Path, metadata: dict[str, str], status: str = "interrupted", **details: Any
) -> None:
    """The outputs of a run whose process was killed, from its newest checkpoint if there is one."""
    # A run removes the old summary at its start: an existing one belongs to a run that had ended.
    if (folder / "summary.json").exists() or not checkpoint.numbers(folder / "checkpoints"):
        return
    last = checkpoint.newest(folder)
    rows = [row for row in read_rows(folder) if row["round"] < last.round] + [last.row]
    write_outputs(
        folder,
        last.model,
        rows,
        metadata,
        config=last.config,
        status=status,
        seconds=sum(row["seconds"]["total"] for row in rows),
        command=shlex.join(["fedfrozen", *last.overrides]),
        selected_round=last.hooks["best"]["round"],
        **details,
    )
