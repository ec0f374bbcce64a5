"""`sites.json` as a table: the global model's metrics on each site's test rows, the worst site first."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.files.rows import metric_title, number
from fedfrozen_app.report.html import Table, text

FILE = "sites.json"
ORDER = ("c_index", "brier", "r2", "mae", "dice", "iou")  # the first columns, in this order
NOTES = {
    "train": "The Brier score is integrated over the times between which eight of ten events of the clients' "
    "train rows lie; its censoring weights, and a Cox model's baseline hazard, are of these rows. 0 is best, "
    "and a model that says one half throughout has 0.25.",
    "test": "The clients' train rows are not the server's to read: a Cox model then has no baseline hazard "
    "and no Brier score, and other models' is weighted by the censoring of the test rows.",
}
log = logging.getLogger(__name__)


def read_site_scores(run: Path) -> dict[str, Any] | None:
    """Read sites.json; None if there is none, or it cannot be read (logged)."""
    try:
        found = read_object(run / FILE)
    except UserError as error:
        log.warning("The metrics by site are left out: %s", error)
        return None
    rows = None if found is None else found.get("rows")
    if found is not None and not (
        isinstance(rows, list) and rows and all(isinstance(row, dict) and "name" in row for row in rows)
    ):
        log.warning("The metrics by site are left out: %s is not as a run writes it.", run / FILE)
        return None
    return found


def site_scores_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The table and its note."""
    if found is None:
        return None
    whole, *sites = found["rows"]
    names = metric_names(found["rows"])
    if not names:
        return None
    ordered = [whole, *sorted(sites, key=lambda row: _first(row, names[0]))]
    body = [
        [text(row["name"]), _count(row.get("rows")), *(_decimal(row.get(name)) for name in names)]
        for row in ordered
    ]
    head = ["", "test rows", *(metric_title(name) for name in names)]
    return {"table": Table(head, body), "note": NOTES.get(str(found.get("reference")), "")}


def metric_names(rows: list[Mapping[str, Any]]) -> list[str]:
    found = dict.fromkeys(
        key for row in rows for key, value in row.items() if key != "rows" and not math.isnan(number(value))
    )
    first = [name for name in ORDER if name in found]
    return [*first, *(name for name in found if name not in first and name != "loss")]


def _first(row: Mapping[str, Any], name: str) -> float:
    """Sort key of the rows: a site without the metric comes last."""
    value = number(row.get(name))
    return math.inf if math.isnan(value) else value


def _count(value: object) -> str:
    return "" if math.isnan(number(value)) else f"{number(value):,.0f}"


def _decimal(value: object) -> str:
    return "" if math.isnan(number(value)) else f"{number(value):.4f}"
