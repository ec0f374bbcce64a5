"""`baselines.json` as tables: results of other models on the rows of a run."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.files.rows import metric_title, number
from fedfrozen_app.report.html import Table, text

FILE = "baselines.json"
log = logging.getLogger(__name__)


def read_baselines(run: Path, rounds: object) -> list[dict[str, Any]]:
    """The entries; none if there is no file, the run has continued since, or it cannot be read (logged)."""
    try:
        found = read_object(run / FILE)
    except UserError as error:
        log.warning("The baselines are left out: %s", error)
        return []
    if found is None or ("rounds" in found and found["rounds"] != rounds):
        return []
    entries = found.get("baselines")
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "name" in one for one in entries):
        log.warning("The baselines are left out: %s is not as `fedfrozen baselines` writes it.", run / FILE)
        return []
    return entries


def baselines_section(
    entries: Sequence[dict[str, Any]], summary: Mapping[str, Any], metric: str
) -> Table | None:
    """A table with the run first, then every baseline; None if there are none."""
    if not entries:
        return None
    final = number(summary.get(f"final_test_{metric}"))
    body = [["this run", _decimal(final), "", ""]]
    for one in entries:
        value = number(one.get(metric))
        body.append([text(one["name"]), _decimal(value), spread_text(one, metric), _rows(one)])
    return Table(["", f"test {metric_title(metric)}", "lowest to highest client", "train rows"], body)


def values_of(entries: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """This metric by name, of the baselines that have it."""
    found = {text(one["name"]): number(one.get(metric)) for one in entries}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def spread_text(one: Mapping[str, Any], metric: str) -> str:
    """The range from worst to best client, for a baseline that each client trained alone."""
    found = one.get("by_client")
    if not isinstance(found, dict):
        return ""
    values = [number(own.get(metric)) for own in found.values() if isinstance(own, dict)]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return ""
    of = f" of {text(one['of_clients'])}" if "of_clients" in one else ""
    return f"{min(values):.4f} to {max(values):.4f} ({len(values)}{of})"


def _rows(one: Mapping[str, Any]) -> str:
    rows = number(one.get("train_rows"))
    return "" if math.isnan(rows) else f"{rows:,.0f}"


def _decimal(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"
