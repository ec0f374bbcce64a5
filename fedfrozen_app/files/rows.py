"""The rows of a run, as metrics.jsonl holds them."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.errors import UserError

logger = logging.getLogger(__name__)
Row = dict[str, Any]


def read_rows(run_dir: Path) -> list[Row]:
    """The rows of metrics.jsonl. A last line cut short by a killed run is left out and logged."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl: give the folder of a run.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: give the folder of a run whose rows are whole.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                logger.warning("%s: the last line is cut short and was left out", path)
                break
            raise UserError(f"{path}, line {number} is not JSON: mend or remove it.") from error
        if not isinstance(row, dict) or not isinstance(row.get("round"), int):
            raise UserError(f"{path}, line {number} has no round: it must be a row of metrics.")
        rows.append(row)
    return rows


def metric_name(rows: Sequence[Row]) -> str:
    """What the run was judged by: "f1" where it was measured, else "accuracy"."""
    return "f1" if any("test_f1" in row for row in rows) else "accuracy"


def number(value: object) -> float:
    """A finite float, or NaN for anything else (JSON null stands for NaN in strict writers)."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan
