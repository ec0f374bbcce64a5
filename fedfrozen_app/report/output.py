"""The files a run leaves behind, written when it ends."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfrozen_app.report.console import headline
from fedfrozen_app.report.curves import write_curves
from fedfrozen_app.report.page import write_report
from fedfrozen_app.report.selection import write_selection
from fedfrozen_app.report.summary import summarise
from fedfrozen_app.runtime.checkpoint import replace_file, replace_tensors


def write_outputs(
    folder: Path,
    model: Mapping[str, Tensor],
    rows: Sequence[dict[str, Any]],
    metadata: dict[str, str] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """`model.safetensors`, `summary.json`, `curves.png` and `report.html`; returns the summary."""
    if model:  # a run that failed before its first round has none
        replace_tensors(model, folder / "model.safetensors", metadata)
    summary = summarise(rows, **facts)
    replace_file(folder / "summary.json", json.dumps(summary, indent=2))
    for name in ("model.safetensors", "best.safetensors"):  # safetensors' own mode shuts everybody else out
        if (folder / name).exists():
            shutil.copymode(folder / "summary.json", folder / name)
    write_curves(rows, folder / "curves.png", title=headline(summary))
    if any(row.get("selection") for row in rows):
        write_selection(rows, folder / "selection.png")
    write_report(folder)
    return summary
