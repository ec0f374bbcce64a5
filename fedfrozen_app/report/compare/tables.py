"""A comparison as tables: in the terminal, as CSV, Markdown and LaTeX, all with the same cells."""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from rich.table import Table
from rich.text import Text

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.rows import STABLE_ROUNDS
from fedfrozen_app.report.compare.model import METRICS, Comparison, Group, Spread, heading
from fedfrozen_app.report.console import human_bytes, human_seconds

ALSO = "also differs"
NOTHING = "–"
# name -> formatter of its numbers
WRITTEN: dict[str, Callable[[float], str]] = {
    "bytes_up": human_bytes,
    "bytes_down": human_bytes,
    "bytes_to_target": human_bytes,
    "seconds": human_seconds,
    "virtual_seconds": human_seconds,
    "virtual_to_target": human_seconds,
    "rounds_to_target": lambda value: f"{value:.1f}",
}
ALWAYS = ("runs", "seeds")  # columns of every table of metrics
QUALITY = ("final", "selected", "worst_client")
STABILITY = ("std_last_10", "best_minus_final")
TO_TARGET = ("rounds_to_target", "bytes_to_target", "virtual_to_target")
COST = ("bytes_up", "bytes_down", "rounds_to_target", "bytes_to_target", "seconds")
VIRTUAL = ("virtual_to_target", "virtual_seconds")


@dataclass(frozen=True)
class Sheet:
    title: str
    headings: list[str]
    rows: list[list[str]]  # one cell for each heading; the first names the group


def sheets(comparison: Comparison) -> list[Sheet]:
    """The printed tables: quality, stability, cost, and the tests if there are any."""
    found = [
        _metrics_sheet(comparison, "Quality", QUALITY),
        _metrics_sheet(comparison, "Stability", STABILITY),
        _metrics_sheet(comparison, "Cost", COST),
        _metrics_sheet(comparison, "Virtual time", VIRTUAL),
    ]
    found = [sheet for sheet in found if len(sheet.headings) > len(ALWAYS)]
    found += _baselines_sheet(comparison)
    if any(group.test for group in comparison.groups):
        found.append(_tests_sheet(comparison))
    return found


def _metrics_sheet(comparison: Comparison, title: str, names: Sequence[str]) -> Sheet:
    shown = [name for name in names if any(name in group.spreads for group in comparison.groups)]
    headings = [*ALWAYS, *(heading(name, comparison) for name in shown)]
    rows = [
        [group.label, str(len(group.runs)), *(_cell(name, group) for name in shown)]
        for group in comparison.groups
    ]
    if "final" in shown:
        headings.insert(3, "95 % interval")
        for row, group in zip(rows, comparison.groups, strict=True):
            row.insert(3, _interval(group.spreads["final"]))
    return Sheet(title, headings, rows)


def _baselines_sheet(comparison: Comparison) -> list[Sheet]:
    """The results of `fedfrozen baselines`, one row per baseline and group."""
    rows = []
    for group in comparison.groups:
        for name in dict.fromkeys(name for run in group.runs for name in run.baselines):
            beside = [run for run in group.runs if name in run.baselines and "final" in run.metrics]
            if beside:
                differences = [run.metrics["final"] - run.baselines[name] for run in beside]
                mean = _spread_cell([run.baselines[name] for run in beside])
                change = _spread_cell(differences, "+.4f")
                rows.append([group.label, name, str(len(beside)), mean, change])
    if not rows:
        return []
    headings = ["runs", "baseline", "seeds", heading("final", comparison), "runs − baseline"]
    return [Sheet("Baselines of the same rows", headings, rows)]


def _spread_cell(values: Sequence[float], form: str = ".4f") -> str:
    text = format(fmean(values), form)
    return text if len(values) < 2 else f"{text} ± {stdev(values):.4f}"


def _cell(name: str, group: Group) -> str:
    spread = group.spreads.get(name)
    if spread is None:
        return NOTHING
    write = WRITTEN.get(name, lambda value: f"{value:.4f}")
    text = write(spread.mean)
    if spread.std is not None and name not in ("bytes_up", "bytes_down", "seconds"):
        text += f" ± {write(spread.std)}"
    missed = sum(not run.reached for run in group.runs)
    if name not in TO_TARGET or not missed:
        return text
    if missed == len(group.runs):
        return "not reached"
    return f"{text} ({missed} of {len(group.runs)} censored)" if name == "rounds_to_target" else text


def _interval(spread: Spread) -> str:
    return NOTHING if spread.low is None else f"{spread.low:.4f} to {spread.high:.4f}"


def _tests_sheet(comparison: Comparison) -> Sheet:
    headings = ["runs", "baseline", "seeds", "Δ mean", "d_z", "p (t)", "p (W)", "verdict"]
    tested = [(group.label, group.test) for group in comparison.groups if group.test is not None]
    rows = []
    for label, test in tested:
        numbers = [_signed(test.difference, 4), _signed(test.effect, 2)]
        pvalues = [_pvalue(test.t_holm), _pvalue(test.wilcoxon_holm)]
        rows.append([label, test.baseline, str(len(test.seeds)), *numbers, *pvalues, test.verdict])
    if any(test.beside for _, test in tested):
        headings.append(ALSO)
        for row, (_, test) in zip(rows, tested, strict=True):
            row.append(_also(test.beside))
    title = f"{heading(comparison.tested, comparison).capitalize()} against the baseline, p after Holm"
    return Sheet(title, headings, rows)


def _also(beside: Sequence[str]) -> str:
    """The sections in which a method's file sets keys: "client (5 settings)"."""
    sections = Counter(text.partition("=")[0].partition(".")[0] for text in beside)
    return ", ".join(f"{name} ({counted(count, 'setting')})" for name, count in sections.items()) or NOTHING


def _signed(value: float | None, digits: int) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:+.{digits}f}".replace("inf", "∞")


def _pvalue(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# Terminal, Markdown, LaTeX ------------------------------------------------------------------------------


def to_terminal(comparison: Comparison) -> list[Table]:
    tables = []
    for sheet in sheets(comparison):
        table = Table(title=Text(sheet.title), title_justify="left")
        shown = [place for place, title in enumerate(sheet.headings) if title != ALSO]  # a note says it whole
        for place in shown:
            justify: Literal["left", "right"] = "left" if place == 0 else "right"
            table.add_column(Text(sheet.headings[place]), justify=justify, overflow="fold")
        for row in sheet.rows:
            table.add_row(*(Text(row[place]) for place in shown))
        tables.append(table)
    return tables


def footnotes(comparison: Comparison) -> list[str]:
    """Notes to print below the tables, in every format."""
    notes = [
        "Mean ± standard deviation over seeds; Student interval of the mean of the final metric, cut at 0 "
        "and 1. Selected: the round with the best validation accuracy."
    ]
    if comparison.target is not None:
        notes.append(
            f"Rounds to {comparison.target:g}: restricted mean. A run that does not reach it is censored: it "
            f"counts with all {counted(comparison.horizon, 'round')}, and with the bytes that it sent."
        )
    if not any(name in group.spreads for name in STABILITY for group in comparison.groups):
        notes.append(
            f"No stability: it takes {STABLE_ROUNDS} evaluated rounds or more, and these runs have fewer."
        )
    notes += comparison.notes
    return notes + [f"Left out: {folder}: {reason}" for folder, reason in comparison.left_out]


def to_markdown(comparison: Comparison) -> str:
    parts = []
    for sheet in sheets(comparison):
        lines = [sheet.headings, ["---", *("---:" for _ in sheet.headings[1:])], *sheet.rows]
        table = "\n".join("| " + " | ".join(_markdown(cell) for cell in line) + " |" for line in lines)
        parts.append(f"### {sheet.title}\n\n{table}\n")
    parts.append("\n".join(f"- {_markdown(note)}" for note in footnotes(comparison)) + "\n")
    return "\n".join(parts)


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def to_latex(comparison: Comparison) -> str:
    r"""`tabular`s for \usepackage{booktabs}."""
    parts = ["% \\usepackage{booktabs}"]
    for sheet in sheets(comparison):
        columns = "l" + "r" * (len(sheet.headings) - 1)
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (sheet.headings, *sheet.rows)]
        lines[1:1] = [r"\midrule"]
        body = "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *lines, r"\bottomrule"])
        parts.append(f"% {sheet.title}\n{body}\n\\end{{tabular}}")
    parts += [f"% {note}".replace("\n", " ") for note in footnotes(comparison)]
    return "\n\n".join(parts) + "\n"


_LATEX = {
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "Δ": r"$\Delta$",
    "∞": r"$\infty$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


# CSV ----------------------------------------------------------------------------------------------------


def to_csv(comparison: Comparison) -> str:
    """One row per group, in full precision; bytes and seconds as plain numbers."""
    settings = list(dict.fromkeys(key for group in comparison.groups for key in group.settings))
    names = [name for name in METRICS if any(name in group.spreads for group in comparison.groups)]
    parts = ("mean", "std", "low", "high", "n")
    tests = ("baseline", "difference", "effect", "t", "wilcoxon", "t_holm", "wilcoxon_holm", "verdict")
    table: list[list[object]] = [
        [
            *("label", "seeds", *settings),
            *(f"{name}_{part}" for name in names for part in parts),
            *(f"test_{part}" for part in tests),
            *("test_beside", "reached_target"),
        ]
    ]
    for group in comparison.groups:
        line: list[object] = [group.label, " ".join(str(run.seed) for run in group.runs)]
        line += [group.settings.get(key, "") for key in settings]
        for name in names:
            spread = group.spreads.get(name)
            line += (
                ["", "", "", "", 0]
                if spread is None
                else [spread.mean, spread.std, spread.low, spread.high, len(spread.values)]
            )
        line += [getattr(group.test, part) if group.test else "" for part in tests]
        line += ["; ".join(group.test.beside) if group.test else "", sum(run.reached for run in group.runs)]
        table.append(line)
    return _as_csv(table)


def runs_csv(comparison: Comparison) -> str:
    """One row per run, for statistics of your own."""
    settings = list(dict.fromkeys(key for group in comparison.groups for key in group.settings))
    table: list[list[object]] = [["label", *settings, "seed", *METRICS, "reached_target", "folder"]]
    for group in comparison.groups:
        for run in group.runs:
            shown = [group.settings.get(key, "") for key in settings]
            names = [run.metrics.get(name, "") for name in METRICS]
            table.append([group.label, *shown, run.seed, *names, run.reached, str(run.folder)])
    return _as_csv(table)


def _as_csv(table: Sequence[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([["" if cell is None else cell for cell in line] for line in table])
    return buffer.getvalue()
