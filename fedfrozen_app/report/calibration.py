"""`calibration.json` as sentences, tables, a section of the report, and lines of a model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as Grid
from rich.text import Text

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.readers import known_files, read_object
from fedfrozen_app.report.html import Table

FILE = "calibration.json"


def read_calibration(run: Path) -> dict[str, Any] | None:
    """The calibration of the current model; None if there is none, or a resumed run has changed the model."""
    found = read_object(run / FILE)
    known = known_files(run)
    if found is None or known is None:
        return found
    model = known.files.get("model.safetensors")
    return found if model is not None and model.sha256 == found.get("model_sha256") else None


def lines_of(found: Mapping[str, Any]) -> list[str]:
    rows, whole = found["rows"], (found.get("test") or {}).get("all", {}).get("all")
    of = "the server's" if rows["source"] == "server" else f"{counted(rows['parts'], 'client')}'"
    lines = []
    if found["temperature"] is not None and found.get("epsilon") is None:
        change = ""
        if "before" in found:
            before, after = found["before"], found["after"]
            change = (
                f" On the test rows the calibration error goes from {before['ece']:.3f} to "
                f"{after['ece']:.3f}, the loss from {before['loss']:.3f} to {after['loss']:.3f}."
            )
        lines.append(f"Temperature {found['temperature']:.4g}, from {of} {rows['temperature']} rows.{change}")
    lines.append(
        f"Coverage {found['coverage']:.0%}: {rule_in_words(found)}, from {of} {rows['quantile']} rows."
    )
    if found.get("epsilon") is not None:
        lines.append(
            f"With noise of epsilon {found['epsilon']:g} for each patient or document, which moves the "
            f"coverage by about {found['noise']:.1%}. The temperature stays 1. Each call spends it again."
        )
    if found.get("masked"):
        lines.append(
            "Each client's sums and counts were masked: only those of all clients together are known."
        )
    if whole:
        what = "are followed to their bound or beyond" if found["kind"] == "time" else "are covered"
        lines.append(
            f"On {whole['rows']:,} test rows {whole['coverage']:.1%} {what} (95 %: {whole['low']:.1%} "
            f"to {whole['high']:.1%}), {size_of(whole, found)}."
        )
    lines.append(
        "The coverage holds for rows drawn as the calibration rows were, all of them together: a single "
        "client, class or subgroup can have less."
    )
    return [*lines, *found.get("notes", [])]


def rule_in_words(found: Mapping[str, Any]) -> str:
    threshold = f"{found['threshold']:.4g}"
    if found["kind"] == "classes":
        return f"a class is in the set where 1 - probability is at most {threshold}"
    if found["kind"] == "number":
        return f"the interval is the prediction plus and minus {threshold}"
    if found.get("edges") is None:
        return f"the event does not come before {threshold} / exp(score)"
    return (
        f"the event does not come before the time at which the cumulative hazard (of each interval log(1 + "
        f"exp(score)), within it along a line) reaches {threshold}, at most the last edge"
    )


def size_of(one: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if one["size"] is None:
        return "without bound"
    if found["kind"] == "time":
        broken = one["broken"]
        return (
            f"{broken:.1%} had the event before it, and the others were censored before it; the mean bound "
            f"is {one['size']:.4g}"
        )
    return (
        f"{one['size']:.2f} classes on average" if found["kind"] == "classes" else f"{one['size']:.4g} wide"
    )


def sheets(found: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """One table for each group column of the test rows, the least covered group first."""
    size = {"classes": "mean set size", "time": "mean bound"}.get(found["kind"], "width")
    made = []
    for column, values in (found.get("test") or {}).items():
        if column == "all" or not values:
            continue
        ordered = sorted(values.items(), key=lambda item: item[1]["coverage"])
        body = [
            [
                value,
                f"{one['rows']:,}",
                f"{one['coverage']:.3f}",
                f"{one['low']:.3f} to {one['high']:.3f}",
                "" if one["size"] is None else f"{one['size']:.4g}",
            ]
            for value, one in ordered
        ]
        made.append(
            (f"By {column} ({len(body)})", Table([column, "test rows", "covered", "95 %", size], body))
        )
    return made


def tables_of(found: Mapping[str, Any]) -> list[Grid]:
    grids = []
    for title, table in sheets(found):
        grid = Grid(title=Text(title), title_justify="left")
        for place, heading in enumerate(table.head):
            grid.add_column(heading, justify="left" if place == 0 else "right")
        for line in table.body:
            grid.add_row(*map(Text, line))
        grids.append(grid)
    return grids


def calibration_section(run: Path) -> dict[str, Any] | None:
    found = read_calibration(run)
    return None if found is None else {"lines": lines_of(found), "tables": sheets(found)}


def rule_for_export(found: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration rule that an exported model carries."""
    whole = (found.get("test") or {}).get("all", {}).get("all", {})
    keys: Sequence[str] = ("kind", "coverage", "temperature", "threshold", "rows", "notes")
    timed = {"edges": found.get("edges")} if found["kind"] == "time" else {}
    return {key: found.get(key) for key in keys} | timed | {"test": whole}
