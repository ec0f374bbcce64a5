"""The rows of a run in metrics.jsonl."""

import json
import logging
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.append import append
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.readers import TRIES, Damaged, known_files, manifest_stamp

logger = logging.getLogger(__name__)
Row = dict[str, Any]
FILE = "metrics.jsonl"
# The types of a row's values, if present: everything that is later summed, indexed or iterated.
NUMBERS = (
    *("bytes_up", "bytes_down", "bytes_down_cold", "clients_ok", "clients_failed", "trained_params"),
    *("epsilon_max", "delta"),
)
OBJECTS = ("seconds", "by_client", "epsilon", "drift", "bytes_up_by_role", "bytes_down_by_role")
LISTS = ("clients", "failures")

# The metrics that rounds are compared by: the first one in a row counts. Rows name any other explicitly.
HEADLINES = ("f1", "accuracy", "c_index", "r2")
TITLES = {"c_index": "C-index", "r2": "R²", "mae": "mean absolute error", "brier": "Brier score"}

STABLE_ROUNDS = 20  # evaluated rounds; a shorter run is still learning, so its last ten show no stability


def first_rounds(rows: Iterable[Row]) -> dict[str, int]:
    """The first round in which each client was asked to train. With pacing a reply may count in a later
    round; the row of the earlier round lists the requests."""
    found: dict[str, int] = {}
    for row in rows:
        asked = row.get("virtual_asked") or row.get("pacing", {}).get("asked", ())
        for client in (*row.get("clients", ()), *asked):
            found.setdefault(client, row["round"])
    return found


@dataclass
class ReadRows:
    rows: list[Row] = field(default_factory=list)  # the intact ones
    damage: str = ""  # "" if all are intact
    cut_short: bool = False  # the last line was truncated by a kill


def is_long(rows: Sequence[Row], metric: str) -> bool:
    """Whether enough rounds were evaluated to speak of stability."""
    return sum(row["round"] > 0 and f"test_{metric}" in row for row in rows) >= STABLE_ROUNDS


def read_rows(run_dir: Path) -> list[Row]:
    """The rows of metrics.jsonl. A last line cut short by a killed run is left out and logged."""
    found = whole_rows(run_dir)
    if found.damage:
        raise Damaged(run_dir / FILE, found.damage)
    if found.cut_short:
        logger.warning("%s: the last line is cut short and was left out", run_dir / FILE)
    return found.rows


def whole_rows(run_dir: Path) -> ReadRows:
    """The intact rows, and what is wrong with the others."""
    for _ in range(TRIES):
        stamp = manifest_stamp(run_dir)
        found = _whole_rows(run_dir)
        if not found.damage or manifest_stamp(run_dir) == stamp:  # no run has added rows since
            break
    return found


def _whole_rows(run_dir: Path) -> ReadRows:
    path = run_dir / FILE
    recorded, ended = _recorded(run_dir)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if any(recorded):
            return ReadRows(damage="it is missing")
        raise UserError(f"{run_dir} holds no metrics.jsonl: give the folder of a run.") from error
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror}") from error
    *lines, rest = content.split(b"\n")
    if rest and _row(rest) is not None:  # complete except for the line break, which other tools omit
        lines, rest = [*lines, rest], b""
    digests = [manifest.row_digest(line) for line in lines]
    if recorded and not any(_fits(digests, known, more=not ended) for known in recorded):
        return _damaged(lines, digests, recorded[0])
    found = ReadRows(cut_short=bool(rest))
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        problem = "is not JSON" if row is None else _problem(row)
        if problem:
            found.damage = found.damage or f"line {number} {problem}"
        elif row is not None:
            found.rows.append(row)
    return found


def _recorded(run_dir: Path) -> tuple[list[list[str]], bool]:
    """The manifest's records of the rows: the current ones, or those before its last line; and whether the
    run has ended."""
    known = known_files(run_dir)
    if known is None or known.rows is None:
        return [], False
    last = known.before
    before = [last[1]] if last is not None and last[0] == "" and last[1] is not None else []
    return [known.rows, *before], known.ended


def _fits(digests: Sequence[str], known: Sequence[str], *, more: bool) -> bool:
    """Whether rows match the record; with `more`, a last row may have been added just before a kill."""
    return list(digests[: len(known)]) == list(known) and len(digests) <= len(known) + more


def _damaged(lines: Sequence[bytes], digests: Sequence[str], known: Sequence[str]) -> ReadRows:
    whole = set(known)
    rows = [
        row for line, digest in zip(lines, digests, strict=True) if digest in whole and (row := _row(line))
    ]
    wrong = next((n for n, (a, b) in enumerate(zip(digests, known, strict=False), start=1) if a != b), None)
    if wrong is not None:
        return ReadRows(rows, f"line {wrong} is not as it was written")
    if len(digests) < len(known):
        return ReadRows(rows, f"it has {len(digests)} whole rows, and {len(known)} were written")
    return ReadRows(rows, f"it has {len(digests)} rows, and {len(known)} were written")


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else {}


def _problem(row: Row) -> str:
    """What is wrong with a row; "" if nothing is."""
    if not isinstance(row.get("round"), int):
        return "has no round: it must be a row of metrics"
    for keys, kind, word in ((OBJECTS, dict, "object"), (LISTS, list, "list")):
        for key in keys:
            if not isinstance(row.get(key, kind()), kind):
                return f"holds no {word} under {key}"
    numbers = {key: row[key] for key in NUMBERS if row.get(key) is not None}
    numbers |= {f"seconds.{key}": value for key, value in row.get("seconds", {}).items()}
    numbers |= {key: value for key, value in row.items() if key.startswith(("test_", "val_"))}
    for key, value in numbers.items():
        if value is not None and not isinstance(value, int | float):
            return f"holds no number under {key}"
    return ""


def unrecorded_digests(run_dir: Path) -> list[str] | None:
    """The digests of the current lines, if all are rows, for a manifest that lacks them."""
    *lines, rest = (run_dir / FILE).read_bytes().split(b"\n")
    rows = [_row(line) for line in lines]
    if rest or not all(row is not None and not _problem(row) for row in rows):
        return None
    return [manifest.row_digest(line) for line in lines]


def last_row(run_dir: Path) -> Row | None:
    """The last row, regardless of the manifest; None if its line is not JSON. Raises `OSError`."""
    return _row((run_dir / FILE).read_bytes().rstrip(b"\n").rpartition(b"\n")[2])


def rows_to_keep(run_dir: Path, *, replaced: bool) -> list[Row]:
    """The intact rows, for a run that continues. With `replaced`, a damaged file is kept under another
    name."""
    found = whole_rows(run_dir)
    if found.damage:
        logger.warning("%s is damaged (%s): the rows that are whole are kept.", run_dir / FILE, found.damage)
        if replaced and (run_dir / FILE).is_file():
            shutil.copyfile(run_dir / FILE, run_dir / f"{FILE}.damaged")
    return found.rows


def append_row(path: Path, row: Row) -> None:
    """Append a row, completely or not at all, and record it in the folder's manifest."""
    line = json.dumps(row)
    append(path, line, sync=False)
    manifest.note_row(path.parent, line)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace all rows."""
    lines = [json.dumps(row) for row in rows]
    manifest.note_rows(path.parent, lines)
    replace_file(path, "".join(f"{line}\n" for line in lines))


def cold_bytes_down(row: Row) -> int:
    """Bytes down as if no client had held any arrays at the start, so that repeated runs agree. Only real
    sites hold arrays from earlier runs, so only their runs record it."""
    return row.get("bytes_down_cold", row.get("bytes_down")) or 0


def metric_name(rows: Sequence[Row]) -> str:
    """The metric that a run's rounds are compared by (larger is better): the one its rows name as `metric`,
    else the first of the known ones that was measured."""
    named = next((row["metric"] for row in rows if isinstance(row.get("metric"), str)), None)
    measured = (
        name for name in HEADLINES if any(f"{part}_{name}" in row for row in rows for part in ("test", "val"))
    )
    return named or next(measured, "accuracy")


def metric_title(metric: str) -> str:
    """The metric's name in tables."""
    return TITLES.get(metric, metric)


def capitalised(metric: str) -> str:
    """The metric's name at the start of a chart's title."""
    return TITLES.get(metric) or metric.capitalize()


def number(value: object) -> float:
    """A finite float, or NaN for anything else (strict JSON writers use null for NaN)."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan
