"""The account of a run's rows in `data.json`, for the report and the summary."""

import logging
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.quantiles import quantiles
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.report.html import Table

log = logging.getLogger(__name__)

MOST_CLIENTS = 1000  # listed one by one
MOST_CLASSES = 12  # columns of the table; for more classes, only their number
PARTS = {"rows": dict, "splits": dict, "clients": dict, "classes": list, "warnings": list}
SPLITS = {"train": "train", "test": "test", "server_validation": "of train, kept by the server"}


def read_data(run_dir: Path) -> dict[str, Any] | None:
    """Read data.json; None if there is none (older runs) or it is damaged, which is logged."""
    path = run_dir / "data.json"
    try:
        found = read_object(path)
    except UserError as error:
        log.warning("The account of rows is left out: %s", error)
        return None
    if found is not None and any(not isinstance(found.get(key), kind) for key, kind in PARTS.items()):
        log.warning("The account of rows is left out: %s is not as a run writes it.", path)
        return None
    return found


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of rows and classes for summary.json."""
    rows = found["rows"]
    lost = {split: sum(part["dropped"].values()) for split, part in found["splits"].items()}
    texts = found.get("texts", {}).get("splits", {}).values()
    cut = {"cut_texts": sum(part["cut"] for part in texts)} if texts else {}
    return {
        **cut,
        "train_rows": rows["train"]["rows"],
        "test_rows": rows["test"]["rows"],
        "validation_rows": rows["server_validation"]["rows"],
        "dropped_rows": sum(lost.values()),
        "num_classes": len(found["classes"]),
        "train_classes": rows["train"]["by_class"],
        "test_classes": rows["test"]["by_class"],
        "warnings": len(found["warnings"]),
    }


def _text_line(texts: dict[str, Any]) -> tuple[str, str]:
    """The maximum length of a text, and how many texts are longer."""
    pieces = texts["tokenizer"]
    length = f"{texts['max_tokens']} tokens"
    if texts["chunks"] > 1:
        length = f"{texts['chunks']} chunks of {length}"
    how = f"{pieces['pieces']:,} {'learned pieces' if pieces['learned'] else 'tokens in all'}"
    parts = texts["splits"].values()
    cut, total = sum(part["cut"] for part in parts), sum(part["texts"] for part in parts)
    return f"texts longer than {length} ({how}), whose end is not read", f"{cut:,} of {total:,} texts"


def _band_lines(bands: dict[str, Any], columns: int) -> list[list[str]]:
    """Very many clients in five lines: quantiles of the clients' rows."""
    words = {"p0": "the smallest", "p5": "5 % are smaller", "p50": "the median", "p95": "95 % are smaller"}
    words["p100"] = "the largest"
    empty = [""] * columns
    return [
        [
            f"{bands['clients']:,} clients: {word}",
            f"{bands['rows'][share]:,.0f}",
            f"{bands['classes'][share]:,.0f}",
            *empty,
        ]
        for share, word in words.items()
    ]


def data_section(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The section of the page: a row per split and client, dropped rows with reasons, and warnings."""
    if found is None:
        return None
    classes = found["classes"] if len(found["classes"]) <= MOST_CLASSES else []

    def line(name: str, part: dict[str, Any]) -> list[str]:
        counts = part["by_class"]
        return [name, f"{part['rows']:,}", str(len(counts)), *(f"{counts.get(one, 0):,}" for one in classes)]

    body = [line(SPLITS.get(split, split), part) for split, part in found["rows"].items()]
    clients = list(found["clients"].values())
    bands = found.get("client_bands")
    if len(clients) > MOST_CLIENTS:
        counts = {
            "rows": [one["rows"] for one in clients],
            "classes": [len(one["by_class"]) for one in clients],
        }
        bands = {"clients": len(clients)} | {name: quantiles(values) for name, values in counts.items()}
        clients = []
    body += [line(f"client {part['name']}", part) for part in clients]
    if bands is not None:
        body += [[name, *numbers] for name, *numbers in _band_lines(bands, len(classes))]
    dropped = [
        (f"{split}: {reason}", f"{count:,} of {part['read']:,} rows")
        for split, part in found["splits"].items()
        for reason, count in part["dropped"].items()
    ]
    if "texts" in found:
        dropped.append(_text_line(found["texts"]))
    return {
        "table": Table(["rows of", "rows", "classes", *classes], body),
        "dropped": dropped,
        "warnings": found["warnings"],
    }
