"""MIMIC-III: discharge summaries (NOTEEVENTS) with their ICD-9 diagnoses (DIAGNOSES_ICD), as CSV or CSV.gz.

A row is an admission: its discharge summary with its addenda, and its codes in the order of SEQ_NUM, so that
the primary diagnosis comes first. Rows of a patient are never parted over splits or clients.
"""

from __future__ import annotations

import csv
import zlib
from pathlib import Path

import pandas

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, existing, first_line, reads

CATEGORY = "Discharge summary"
NOTES = ("SUBJECT_ID", "HADM_ID", "CATEGORY", "TEXT")
CHUNK = 20_000  # lines at once
CODES = ("HADM_ID", "SEQ_NUM", "ICD9_CODE")
NUMBERS = ("SUBJECT_ID", "HADM_ID", "ISERROR")


@reads("multilabel")
def read_mimic(spec: DatasetSpec) -> Found:
    root = existing(spec)
    notes = _table(root, "NOTEEVENTS", NOTES, only=CATEGORY)
    notes = notes[notes["HADM_ID"] != ""]
    codes = _table(root, "DIAGNOSES_ICD", CODES)
    codes = codes[codes["ICD9_CODE"] != ""]
    codes = codes.assign(order=pandas.to_numeric(codes["SEQ_NUM"], errors="coerce").fillna(1e9))
    by_admission = codes.sort_values("order", kind="stable").groupby("HADM_ID")["ICD9_CODE"].agg(list)
    rows = Rows([], [], {"patient": [], "document": []}, [])
    for admission, group in notes.groupby("HADM_ID", sort=True):
        rows.content.append("\n".join(group["TEXT"]) or None)
        rows.labels.append(list(dict.fromkeys(by_admission.get(admission, []))))
        rows.columns["patient"].append(group["SUBJECT_ID"].iloc[0])
        rows.columns["document"].append(str(admission))
        rows.origins.append(f"admission {admission}")
    if not rows.content:
        raise UserError(f"{root} has no note of the category {CATEGORY!r} with an admission's number.")
    return Found("multilabel", rows, None, unit="patient")


def _table(root: Path, name: str, columns: tuple[str, ...], only: str | None = None) -> pandas.DataFrame:
    """The columns of a file, as text; `only` the notes of a category, so that two million need no memory."""
    files = [file for suffix in (".csv", ".csv.gz") if (file := root / f"{name}{suffix}").is_file()]
    if not files:
        raise UserError(f"{root} has no {name}.csv or {name}.csv.gz, as MIMIC-III has: check dataset.path.")
    try:
        parts = pandas.read_csv(
            files[0],
            usecols=lambda column: column.upper() in (*columns, "ISERROR"),
            dtype=str,
            keep_default_na=False,
            chunksize=CHUNK,
        )
        table = pandas.concat([_of_category(_whole(part.rename(columns=str.upper)), only) for part in parts])
    except (ValueError, OSError, csv.Error, EOFError, zlib.error) as error:
        raise UserError(f"{files[0]} cannot be read as a table ({first_line(error)}).") from error
    if missing := [column for column in columns if column not in table.columns]:
        raise UserError(f"{files[0]} has no column {missing[0]}, as MIMIC-III has.")
    return table


def _whole(part: pandas.DataFrame) -> pandas.DataFrame:
    """Numbers without the .0 that they have where pandas has saved a column with gaps again."""
    numbers = {name: part[name].str.removesuffix(".0") for name in NUMBERS if name in part}
    return part.assign(**numbers)


def _of_category(part: pandas.DataFrame, only: str | None) -> pandas.DataFrame:
    if only is None or "CATEGORY" not in part:
        return part
    part = part[part["CATEGORY"].str.strip() == only]
    return part[part["ISERROR"] != "1"] if "ISERROR" in part else part
